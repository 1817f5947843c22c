//! Scoped locks out of locks with a TTL.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::cancel::CancellationToken;
use crate::error::{Error, LostReason};
use crate::lock::config::check_ttl;
use crate::lock::{DistributedLock, DistributedLocker, ScopeError, ScopedLock};

const FIRST_WAIT: Duration = Duration::from_millis(5);
const LONGEST_WAIT: Duration = Duration::from_millis(250);
/// A lock is refreshed this often within its TTL.
const REFRESHES: u32 = 3;

/// A scoped lock made of any [`DistributedLocker`]: waits by polling, and refreshes while the
/// closure runs.
///
/// Waiters are not served in order; they ask again after 5 to 300 ms, jittered. While the closure
/// runs, a thread named `leasehold-refresh` refreshes the lock three times within its TTL. If the
/// lock is lost all the same, the closure goes on, and its success is reported as
/// [`Error::Lost`].
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use leasehold::CancellationToken;
/// use leasehold::lock::{MemoryLocker, Scoped, ScopedLock};
///
/// let locks = Scoped::new(MemoryLocker::new(), Duration::from_secs(30))?;
/// let sum = locks.with_lock(&CancellationToken::new(), "sum", || Ok::<_, ()>(1 + 1));
/// assert_eq!(sum.unwrap(), 2);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Scoped<L> {
    locker: L,
    ttl: Duration,
}

impl<L: DistributedLocker> Scoped<L> {
    /// Scoped locks of `locker`, each acquired and refreshed for `ttl`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTtl`] for zero or more than 2^31 - 1 ms, almost 25 days.
    pub fn new(locker: L, ttl: Duration) -> Result<Scoped<L>, Error> {
        check_ttl(ttl)?;
        Ok(Scoped { locker, ttl })
    }

    /// The locker below.
    #[must_use]
    pub fn locker(&self) -> &L {
        &self.locker
    }

    fn run<T, E>(
        &self,
        lock: Box<dyn DistributedLock>,
        f: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, ScopeError<E>> {
        let lock: Arc<dyn DistributedLock> = lock.into();
        let done = CancellationToken::new();
        let refresher = {
            let (lock, done, ttl) = (Arc::clone(&lock), done.clone(), self.ttl);
            let name = "leasehold-refresh".into();
            std::thread::Builder::new().name(name).spawn(move || keep(&*lock, &done, ttl))
        };
        let refresher = match refresher {
            Ok(refresher) => refresher,
            Err(error) => {
                // The reason why nothing ran is worth more than a failed release.
                lock.release().unwrap_or_default();
                return Err(Error::Spawn(Arc::new(error)).into());
            }
        };
        let result = catch_unwind(AssertUnwindSafe(f));
        done.cancel();
        let lost = !matches!(refresher.join(), Ok(true));
        let released = lock.release().map_err(|error| match error {
            Error::NotHeld => Error::Lost(LostReason::NotOwner),
            error => error,
        });
        let released = if lost { Err(Error::Lost(LostReason::NotOwner)) } else { released };
        match (result, released) {
            (Err(panic), _) => resume_unwind(panic),
            (Ok(Ok(value)), Ok(())) => Ok(value),
            (Ok(Ok(_)), Err(lock)) => Err(ScopeError::Lock(lock)),
            (Ok(Err(job)), Ok(())) => Err(ScopeError::Job(job)),
            (Ok(Err(job)), Err(lock)) => Err(ScopeError::Both { job, lock }),
        }
    }
}

/// Refreshes until `done`. False if the lock was lost.
fn keep(lock: &dyn DistributedLock, done: &CancellationToken, ttl: Duration) -> bool {
    let mut wait = ttl / REFRESHES;
    while !done.wait_timeout(wait) {
        wait = ttl / REFRESHES;
        match lock.refresh(ttl) {
            Ok(()) => {}
            Err(Error::NotHeld) => return false,
            Err(error) => {
                log::warn!(target: "leasehold", "refresh failed: {}", error.chain());
                wait = lock.remaining() / REFRESHES;
                if wait.is_zero() {
                    return false;
                }
            }
        }
    }
    true
}

impl<L: DistributedLocker> ScopedLock for Scoped<L> {
    fn with_lock<T, E, F>(
        &self,
        cancel: &CancellationToken,
        key: &str,
        f: F,
    ) -> Result<T, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>,
    {
        let mut waits = Backoff::new(FIRST_WAIT, LONGEST_WAIT, fastrand::Rng::new());
        loop {
            if cancel.is_cancelled() {
                return Err(Error::Cancelled.into());
            }
            match self.locker.acquire(key, self.ttl) {
                Ok(lock) => return self.run(lock, f),
                Err(Error::NotAcquired) => {}
                Err(error) => return Err(error.into()),
            }
            if cancel.wait_timeout(waits.next()) {
                return Err(Error::Cancelled.into());
            }
        }
    }

    fn try_with_lock<T, E, F>(&self, key: &str, f: F) -> Result<Option<T>, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>,
    {
        match self.locker.acquire(key, self.ttl) {
            Ok(lock) => self.run(lock, f).map(Some),
            Err(Error::NotAcquired) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use crate::lock::MemoryLocker;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Sender, channel};

    /// A locker whose locks tell of refreshes, and fail as they are asked to.
    struct Faulty {
        inner: MemoryLocker,
        refreshes: Sender<()>,
        refresh_fails: Option<Error>,
        release_fails: Option<Error>,
    }

    struct FaultyLock {
        inner: Box<dyn DistributedLock>,
        refreshes: Sender<()>,
        refresh_fails: Option<Error>,
        release_fails: Option<Error>,
    }

    impl DistributedLocker for Faulty {
        fn acquire(&self, key: &str, ttl: Duration) -> Result<Box<dyn DistributedLock>, Error> {
            Ok(Box::new(FaultyLock {
                inner: self.inner.acquire(key, ttl)?,
                refreshes: self.refreshes.clone(),
                refresh_fails: self.refresh_fails.clone(),
                release_fails: self.release_fails.clone(),
            }))
        }

        fn ping(&self) -> Result<(), Error> {
            self.inner.ping()
        }

        fn close(&self) -> Result<(), Error> {
            self.inner.close()
        }
    }

    impl DistributedLock for FaultyLock {
        fn key(&self) -> &str {
            self.inner.key()
        }

        fn ttl(&self) -> Duration {
            self.inner.ttl()
        }

        fn remaining(&self) -> Duration {
            self.inner.remaining()
        }

        fn refresh(&self, ttl: Duration) -> Result<(), Error> {
            // Nobody may listen any more.
            self.refreshes.send(()).unwrap_or_default();
            self.refresh_fails.clone().map_or_else(|| self.inner.refresh(ttl), Err)
        }

        fn release(&self) -> Result<(), Error> {
            let released = self.inner.release();
            self.release_fails.clone().map_or(released, Err)
        }
    }

    type Refreshes = std::sync::mpsc::Receiver<()>;

    fn faulty(
        ttl: Duration,
        refresh: Option<Error>,
        release: Option<Error>,
    ) -> (Scoped<Faulty>, Refreshes) {
        let (refreshes, refreshed) = channel();
        let inner = MemoryLocker::new();
        let locker = Faulty { inner, refreshes, refresh_fails: refresh, release_fails: release };
        (Scoped { locker, ttl }, refreshed)
    }

    const LONG: Duration = Duration::from_secs(60);

    fn never() -> CancellationToken {
        CancellationToken::new()
    }

    #[test]
    fn the_lock_is_refreshed_while_the_closure_runs() {
        let ttl = Duration::from_millis(90);
        let (locks, refreshed) = faulty(ttl, None, None);
        let result = locks.with_lock(&never(), "k", || {
            // Longer than the TTL by far.
            for _ in 0..9 {
                refreshed.recv_timeout(LONG).unwrap();
            }
            Ok::<_, ()>(locks.locker().inner.acquire("k", ttl).is_err())
        });
        assert!(result.unwrap(), "somebody else was granted the lock");
    }

    #[test]
    fn an_error_of_the_release_is_joined_to_the_closures() {
        let (locks, _kept) = faulty(LONG, None, Some(Error::Closed));
        let ok = locks.with_lock(&never(), "k", || Ok::<_, u8>(()));
        assert!(matches!(ok, Err(ScopeError::Lock(Error::Closed))), "{ok:?}");
        let both = locks.with_lock(&never(), "k", || Err::<(), _>(7));
        let Err(ScopeError::Both { job: 7, lock: Error::Closed }) = both else {
            panic!("{both:?}")
        };
    }

    #[test]
    fn a_loss_while_the_closure_runs_is_reported_though_it_succeeded() {
        let (locks, refreshed) = faulty(Duration::from_millis(90), Some(Error::NotHeld), None);
        let result = locks.with_lock(&never(), "k", || {
            refreshed.recv_timeout(LONG).unwrap();
            Ok::<_, ()>(())
        });
        assert!(matches!(result, Err(ScopeError::Lock(Error::Lost(_)))), "{result:?}");
    }

    #[test]
    fn only_contention_is_waited_out() {
        let (locks, _kept) = faulty(LONG, None, None);
        locks.locker().close().unwrap();
        let runs = AtomicUsize::new(0);
        let run = || {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok::<_, ()>(())
        };
        let result = locks.with_lock(&never(), "k", run);
        assert!(matches!(result, Err(ScopeError::Lock(Error::Closed))), "{result:?}");
        assert_eq!(runs.load(Ordering::SeqCst), 0);
    }
}
