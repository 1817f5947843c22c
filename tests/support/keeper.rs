//! Nothing outlives the tests, not even those that are killed with `kill -9`.
//!
//! A shell waits for the end of a pipe whose other end only this process has, and then clears up.
//! A parent-death signal would do the same for a child, but asking for one takes `unsafe`.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// What works in folder `$0` is asked to end, is killed if it goes on for five seconds, and the
/// folder is removed.
const CLEAR_FOLDER: &str = r#"
ids() {
    for process in /proc/[0-9]*; do
        case "$(readlink "$process/cwd")" in "$0" | "$0"/*) echo "${process#/proc/}" ;; esac
    done
}
for round in 1 2 3 4 5; do
    ids=$(ids)
    [ -n "$ids" ] || break
    kill -CONT $ids
    kill -QUIT $ids
    sleep 1
done
ids=$(ids)
[ -z "$ids" ] || kill -KILL $ids
rm -rf -- "$0"
"#;

/// Clears up when this process is gone. Dropping it calls that off.
pub struct Keeper(Child);

impl Keeper {
    /// Runs `script` with these arguments, `$0` first, when this process is gone.
    pub fn new(script: &str, arguments: &[&OsStr]) -> Keeper {
        let shell = Command::new("sh")
            .args(["-c", &format!("read -r _\n{script}")])
            .args(arguments)
            // What is killed together with its process group must not take its keeper along.
            .process_group(0)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Keeper(shell.expect("sh"))
    }

    /// Ends the processes that work in `folder`, and removes it.
    pub fn of_folder(folder: &Path) -> Keeper {
        Keeper::new(CLEAR_FOLDER, &[folder.as_os_str()])
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Killed before its pipe is closed, so it never gets to the script.
        self.0.kill().unwrap_or_default();
        assert!(self.0.wait().is_ok() || std::thread::panicking(), "cannot reap a keeper");
    }
}

/// The processes whose working directory is `folder` or below it.
///
/// A server's processes all work in its data directory, and still do when the postmaster is dead,
/// which is when nothing else tells whose they were.
pub fn processes_in(folder: &Path) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    processes
        .filter_map(|process| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let works_in = fs::read_link(process.path().join("cwd")).ok()?;
            works_in.starts_with(folder).then(|| Pid::from_raw(pid))?
        })
        .collect()
}

/// Sends `signal` to every process in `folder`, and to those that they start meanwhile.
pub fn signal_all(folder: &Path, signal: Signal) {
    let mut told = Vec::new();
    loop {
        let mut new = processes_in(folder);
        new.retain(|pid| !told.contains(pid));
        if new.is_empty() {
            return;
        }
        for pid in &new {
            // It may have ended by itself meanwhile.
            kill_process(*pid, signal).unwrap_or_default();
        }
        told.append(&mut new);
    }
}

/// `kill -9` of every process in `folder`; returns when none is left.
pub fn kill_all(folder: &Path, reap: &mut Child) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        signal_all(folder, Signal::KILL);
        let ended = reap.try_wait().expect("a child of ours").is_some();
        if ended && processes_in(folder).is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "processes in {} survive SIGKILL", folder.display());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the end of `child`; false after `bound`.
pub fn ends_within(child: &mut Child, bound: Duration) -> bool {
    let deadline = Instant::now() + bound;
    while child.try_wait().expect("a child of ours").is_none() {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}
