//! Child processes of the test binary: replicas that can be killed, stopped and let go again.
//!
//! A child runs the test named [`ENTRY`] of the same binary, with its role in the environment. It
//! reports in lines that start with `@ ` and hears of its parent through its standard input.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, unbounded};
use rustix::process::{Pid, Signal, kill_process};

/// The test that a child runs.
const ENTRY: &str = "replica::a_replica_reports_and_ends_with_its_parent";
const ROLE: &str = "LEASEHOLD_TEST_ROLE";

/// What this process is a child for; `None` in the parent.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// In a child: tells the parent a line.
pub fn report(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("@ {line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

pub struct Child {
    process: std::process::Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<(Instant, String)>,
}

impl Child {
    pub fn spawn(role: &str, environment: &[(&str, &str)]) -> Child {
        Child::start(Command::new(std::env::current_exe().unwrap()), role, environment)
    }

    /// A child inside a network namespace: a [`Net`](super::Net), or the name of one.
    pub fn spawn_in(namespace: impl AsRef<str>, role: &str, environment: &[(&str, &str)]) -> Child {
        // `ip` replaces itself with the program, so the pid is the child's own.
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace.as_ref()]).arg(std::env::current_exe().unwrap());
        Child::start(command, role, environment)
    }

    fn start(mut command: Command, role: &str, environment: &[(&str, &str)]) -> Child {
        let mut process = command
            .args(["--exact", ENTRY, "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = process.stdin.take();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = unbounded();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test runner writes lines of its own, and may not end its last one.
                if let Some((_, report)) = line.split_once("@ ") {
                    if sender.send((Instant::now(), report.to_owned())).is_err() {
                        return;
                    }
                }
            }
        });
        Child { process, stdin, lines }
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The next line that starts with `prefix`, when it arrived, and what follows; skips others.
    pub fn expect(&self, prefix: &str, bound: Duration) -> (Instant, String) {
        let deadline = Instant::now() + bound;
        let mut skipped = Vec::new();
        loop {
            match self.lines.recv_deadline(deadline) {
                Ok((at, line)) => match line.strip_prefix(prefix) {
                    Some(rest) => return (at, rest.trim().to_owned()),
                    None => skipped.push(line),
                },
                Err(RecvTimeoutError::Timeout) => {
                    panic!("after {bound:?} no line {prefix:?} of the child, but {skipped:?}")
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the child ended without a line {prefix:?}: {skipped:?}")
                }
            }
        }
    }

    /// The next line, and when it arrived.
    pub fn next(&self, bound: Duration) -> (Instant, String) {
        self.lines.recv_timeout(bound).expect("no further line of the child")
    }

    /// A line that has arrived.
    pub fn try_next(&self) -> Option<(Instant, String)> {
        self.lines.try_recv().ok()
    }

    /// Every line that has arrived and was not taken yet.
    pub fn lines(&self) -> Vec<(Instant, String)> {
        self.lines.try_iter().collect()
    }

    pub fn send(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Closes the child's standard input, which asks it to end.
    pub fn hang_up(&mut self) {
        self.stdin = None;
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.process.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// `kill -9`.
    pub fn kill9(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// SIGSTOP.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// Waits for the child's end.
    pub fn wait(&mut self, bound: Duration) -> ExitStatus {
        let deadline = Instant::now() + bound;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the child does not end within {bound:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Killing works on a stopped process too. It may have ended by itself.
        self.process.kill().unwrap_or_default();
        if let Err(error) = self.process.wait() {
            assert!(std::thread::panicking(), "cannot reap a child: {error}");
        }
    }
}
