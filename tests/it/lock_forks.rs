//! A forked child leaves the locks and sessions of its parent alone.

use std::time::{Duration, Instant};

use leasehold::lock::{LockConfig, PooledLocker, ScopeError, ScopedLocker};
use leasehold::{CancellationToken, Error};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::support::{Server, fork::in_child};

const TTL: Duration = Duration::from_secs(60);

/// How a child ended; -1 if it did not within ten seconds.
fn status_of(pid: i32) -> Option<i32> {
    let pid = Pid::from_raw(pid).unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        if let Some((_, status)) = waitpid(Some(pid), WaitOptions::NOHANG).unwrap() {
            return Some(status.exit_status().unwrap_or(-1));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    kill_process(pid, Signal::KILL).unwrap();
    waitpid(Some(pid), WaitOptions::empty()).unwrap();
    Some(-1)
}

#[test]
fn calls_and_drops_in_a_child_touch_nothing_of_the_parents() {
    let server = Server::start();
    let mut locker = Some(PooledLocker::new(server.config(), LockConfig::new()).unwrap());
    let parent = locker.clone().unwrap();
    let mut lock = Some(parent.acquire("held", TTL).unwrap());
    // An idle session lies in the pool.
    parent.acquire("idle", TTL).unwrap().release().unwrap();
    let verdict = in_child(|| {
        let forked = |result: Result<(), Error>| matches!(result, Err(Error::Forked));
        let (locker, lock) = (locker.take().unwrap(), lock.take().unwrap());
        let mut verdict = forked(locker.close());
        verdict &= forked(locker.ping());
        verdict &= forked(locker.acquire("child", TTL).map(drop));
        verdict &= forked(lock.refresh(TTL));
        verdict &= forked(lock.release());
        verdict &= forked(lock.token().map(drop));
        drop((lock, locker));
        verdict
    });
    assert_eq!(verdict, Some(true));
    let lock = lock.unwrap();
    lock.refresh(TTL).unwrap();
    assert!(parent.try_acquire("held", TTL).unwrap().is_none());
    lock.release().unwrap();
    parent.close().unwrap();
}

#[test]
fn the_last_handles_that_are_dropped_in_a_child_leave_the_parents_sessions_open() {
    let server = Server::start();
    let pooled = PooledLocker::new(server.config(), LockConfig::new()).unwrap();
    let scoped = ScopedLocker::new(server.config(), LockConfig::new()).unwrap();
    let never = CancellationToken::new();
    pooled.acquire("k", TTL).unwrap().release().unwrap();
    scoped.with_lock(&never, "k", || Ok::<_, Error>(())).unwrap();
    let mut client = server.client();
    let sql = "SELECT array_agg(pid ORDER BY pid) FROM pg_stat_activity \
               WHERE application_name = 'leasehold'";
    let mut pids = || client.query_one(sql, &[]).unwrap().get::<_, Vec<i32>>(0);
    let before = pids();
    let mut mine = Some((pooled, scoped));
    let verdict = in_child(|| {
        let (pooled, scoped) = mine.take().unwrap();
        scoped.close();
        drop((pooled, scoped));
        std::thread::sleep(Duration::from_millis(300));
        true
    });
    assert_eq!(verdict, Some(true));
    assert_eq!(pids(), before);
    drop(mine);
}

#[test]
fn a_closure_that_returns_in_a_child_too_does_not_end_the_parents_transaction() {
    let server = Server::start();
    let locks = ScopedLocker::new(server.config(), LockConfig::new()).unwrap();
    let never = CancellationToken::new();
    let mut child = None;
    let outcome = locks.with_lock(&never, "k", || {
        match fork::fork().unwrap() {
            fork::Fork::Child => child = Some(None),
            fork::Fork::Parent(pid) => child = Some(status_of(pid)),
        }
        Ok::<_, Error>(())
    });
    if child == Some(None) {
        let forked = matches!(outcome, Err(ScopeError::Lock(Error::Forked)));
        std::process::exit(i32::from(!forked) + 7);
    }
    assert_eq!(child, Some(Some(7)), "the child was told something else, or did not end");
    outcome.unwrap();
}
