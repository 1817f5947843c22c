//! Servers and backends that are stopped without being ended.

use rustix::process::{Pid, Signal, kill_process};

use super::Server;
use super::keeper::signal_all;

impl Server {
    /// SIGSTOP to the postmaster and all its children.
    pub fn freeze(&self) {
        signal_all(&self.data(), Signal::STOP);
    }

    /// SIGCONT to all of them.
    pub fn thaw(&self) {
        signal_all(&self.data(), Signal::CONT);
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
