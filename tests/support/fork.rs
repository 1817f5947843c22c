//! A fork of the test process, to see what the library says in the child.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use fork::{Fork, fork};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const TRUE: i32 = 42;
const FALSE: i32 = 43;

/// What `f` says in a forked child; `None` if the child did not end within ten seconds.
pub fn in_child(f: impl FnOnce() -> bool) -> Option<bool> {
    let pid = match fork().expect("fork") {
        Fork::Child => {
            let verdict = catch_unwind(AssertUnwindSafe(f)).unwrap_or(false);
            std::process::exit(if verdict { TRUE } else { FALSE });
        }
        Fork::Parent(pid) => Pid::from_raw(pid).unwrap(),
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some((_, status)) = waitpid(Some(pid), WaitOptions::NOHANG).unwrap() {
            return status.exit_status().map(|code| code == TRUE);
        }
        if Instant::now() > deadline {
            kill_process(pid, Signal::KILL).unwrap();
            waitpid(Some(pid), WaitOptions::empty()).unwrap();
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
