//! The contract of [`ScopedLock`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use super::fresh_key;
use crate::cancel::CancellationToken;
use crate::error::Error;
use crate::lock::{ScopeError, ScopedLock};

/// How long a waiter is watched not running.
const WATCHED: Duration = Duration::from_millis(250);
/// How long after the release a waiter may need.
const GRANTED: Duration = Duration::from_secs(10);

/// The error of closures here.
#[derive(Debug, PartialEq, Eq)]
struct Failed(u32);

/// Runs every check of this module. `make` gives another locker with each call, and all of them
/// contend for the same keys.
///
/// # Panics
///
/// If the implementation breaks a rule.
pub fn check_scoped<L: ScopedLock>(make: impl Fn() -> L) {
    closure_runs_and_its_value_comes_back(&make());
    closure_error_comes_back_as_it_is(&make());
    empty_key_is_refused(&make());
    lock_is_free_after_success_error_and_panic(&make());
    contention_is_no_error_of_a_try(&make(), &make());
    not_acquired_of_the_closure_is_not_contention(&make());
    waiter_runs_after_the_release_and_not_before(&make(), &make());
    cancelled_waiter_does_not_run(&make(), &make());
}

#[track_caller]
fn must<T>(result: Result<T, ScopeError<Failed>>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("expected success, got {error:?}"),
    }
}

fn never() -> CancellationToken {
    CancellationToken::new()
}

/// The closure runs on the calling thread, and its value comes back.
///
/// # Panics
///
/// If not.
pub fn closure_runs_and_its_value_comes_back(locks: &impl ScopedLock) {
    let key = fresh_key("runs");
    let here = thread::current().id();
    let there = || Ok::<_, Failed>(thread::current().id());
    assert_eq!(must(locks.with_lock(&never(), &key, there)), here);
    assert_eq!(must(locks.try_with_lock(&key, there)), Some(here));
}

/// The closure's error comes back as it is.
///
/// # Panics
///
/// If not.
pub fn closure_error_comes_back_as_it_is(locks: &impl ScopedLock) {
    let key = fresh_key("error");
    let result = locks.with_lock(&never(), &key, || Err::<(), _>(Failed(7)));
    assert!(matches!(result, Err(ScopeError::Job(Failed(7)))), "{result:?}");
    let result = locks.try_with_lock(&key, || Err::<(), _>(Failed(8)));
    assert!(matches!(result, Err(ScopeError::Job(Failed(8)))), "{result:?}");
}

/// An empty key is [`Error::EmptyName`], and the closure does not run.
///
/// # Panics
///
/// If not.
pub fn empty_key_is_refused(locks: &impl ScopedLock) {
    let run = || -> Result<(), Failed> { panic!("the closure ran without a key") };
    let result = locks.with_lock(&never(), "", run);
    assert!(matches!(result, Err(ScopeError::Lock(Error::EmptyName))), "{result:?}");
    let result = locks.try_with_lock("", run);
    assert!(matches!(result, Err(ScopeError::Lock(Error::EmptyName))), "{result:?}");
}

/// The lock is free when the call is over, however the closure ended, and a panic goes on.
///
/// # Panics
///
/// If not.
pub fn lock_is_free_after_success_error_and_panic(locks: &impl ScopedLock) {
    let key = fresh_key("free");
    let free = || must(locks.try_with_lock(&key, || Ok(true))) == Some(true);
    must(locks.with_lock(&never(), &key, || Ok(())));
    assert!(free(), "after success");
    assert!(locks.with_lock(&never(), &key, || Err::<(), _>(Failed(1))).is_err());
    assert!(free(), "after an error");
    let run = || locks.with_lock(&never(), &key, || -> Result<(), Failed> { panic!("on purpose") });
    let Err(panic) = catch_unwind(AssertUnwindSafe(run)) else {
        panic!("a panic of the closure was swallowed")
    };
    assert_eq!(panic.downcast_ref(), Some(&"on purpose"));
    assert!(free(), "after a panic");
}

/// A try for a key that is held gives `None`, and its closure does not run.
///
/// # Panics
///
/// If not.
pub fn contention_is_no_error_of_a_try(here: &impl ScopedLock, there: &impl ScopedLock) {
    let key = fresh_key("contend");
    must(here.with_lock(&never(), &key, || {
        let run = || -> Result<(), Failed> { panic!("the closure ran under a lock of another") };
        assert_eq!(must(there.try_with_lock(&key, run)), None);
        Ok(())
    }));
}

/// A closure that itself returns [`Error::NotAcquired`] is not taken for contention.
///
/// # Panics
///
/// If it is.
pub fn not_acquired_of_the_closure_is_not_contention(locks: &impl ScopedLock) {
    let result = locks.try_with_lock(&fresh_key("own"), || Err::<(), _>(Error::NotAcquired));
    assert!(matches!(result, Err(ScopeError::Job(Error::NotAcquired))), "{result:?}");
}

/// A waiter has not run while the lock is held, and runs after the release.
///
/// # Panics
///
/// If not.
pub fn waiter_runs_after_the_release_and_not_before(
    here: &impl ScopedLock,
    there: &impl ScopedLock,
) {
    let key = &fresh_key("wait");
    let ran = &AtomicBool::new(false);
    let (run, runs) = channel();
    thread::scope(|scope| {
        must(here.with_lock(&never(), key, || {
            scope.spawn(move || {
                must(there.with_lock(&never(), key, || {
                    ran.store(true, Ordering::SeqCst);
                    run.send(()).map_err(|_| Failed(0))
                }));
            });
            // What is waited for is that nothing happens.
            thread::sleep(WATCHED);
            assert!(!ran.load(Ordering::SeqCst), "the waiter ran while the lock was held");
            Ok(())
        }));
        assert!(runs.recv_timeout(GRANTED).is_ok(), "the waiter did not run after the release");
    });
}

/// A waiter whose token is set hears [`Error::Cancelled`] while the lock is still held, and its
/// closure does not run; neither does one whose token was set before.
///
/// # Panics
///
/// If not.
pub fn cancelled_waiter_does_not_run(here: &impl ScopedLock, there: &impl ScopedLock) {
    let key = &fresh_key("cancel");
    let cancel = &CancellationToken::new();
    let run = || -> Result<(), Failed> { panic!("a cancelled closure ran") };
    must(here.with_lock(&never(), key, || {
        thread::scope(|scope| {
            let waiter = scope.spawn(move || there.with_lock(cancel, key, run));
            thread::sleep(WATCHED);
            cancel.cancel();
            let Ok(result) = waiter.join() else { panic!("the waiter panicked") };
            assert!(matches!(result, Err(ScopeError::Lock(Error::Cancelled))), "{result:?}");
        });
        Ok(())
    }));
    let result = there.with_lock(cancel, key, run);
    assert!(matches!(result, Err(ScopeError::Lock(Error::Cancelled))), "{result:?}");
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use crate::lock::{MemoryLocker, Scoped};

    #[test]
    fn a_scoped_lock_made_of_a_memory_locker_conforms() {
        let first = MemoryLocker::new();
        check_scoped(|| Scoped::new(first.peer(), Duration::from_secs(30)).unwrap());
    }
}
