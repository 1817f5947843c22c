//! Servers and backends that are stopped without being ended.

use rustix::process::{Pid, Signal, kill_process};

use super::Server;

impl Server {
    /// SIGSTOP to the postmaster and all its children.
    pub fn freeze(&self) {
        kill_process(self.pid(), Signal::STOP).unwrap();
        // A child may have ended by itself meanwhile.
        self.children().into_iter().for_each(|pid| {
            kill_process(pid, Signal::STOP).unwrap_or_default();
        });
    }

    /// SIGCONT to all of them.
    pub fn thaw(&self) {
        self.children().into_iter().for_each(|pid| {
            kill_process(pid, Signal::CONT).unwrap_or_default();
        });
        kill_process(self.pid(), Signal::CONT).unwrap();
    }

    /// SIGSTOP to one backend.
    pub fn freeze_backend(&self, pid: i32) {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::STOP).unwrap();
    }

    /// SIGCONT to one backend.
    pub fn thaw_backend(&self, pid: i32) {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::CONT).unwrap();
    }
}
