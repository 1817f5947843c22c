//! Distributed locks over PostgreSQL advisory locks, and in memory for tests.
//!
//! | | lives | waits | one lock costs |
//! | --- | --- | --- | --- |
//! | [`PooledLocker`] | for a TTL, refreshed; the server enforces it | no, or by polling | one pooled session while held |
//! | [`ScopedLocker`] | exactly as long as a closure | in the server's queue, in order | one pooled session while waiting and held |
//! | [`MemoryLocker`] | for a TTL | no | one entry in a map of this process |
//! | [`NoopLocker`] | for a TTL | no | nothing: it always grants |
//!
//! Code that should work with any of them takes a [`DistributedLocker`] or a [`ScopedLock`];
//! [`Scoped`] makes the latter of the former. What the traits promise is in [`conformance`], as
//! functions to run your own implementation through.
//!
//! Leases, for one long-running job on one replica, are at the crate's root: a lock here takes a
//! session of its own, a lease shares one.

mod adapter;
mod breaker;
mod config;
pub mod conformance;
mod core;
mod handle;
mod memory;
mod noop;
mod pooled;
mod scope;
mod scoped;
mod worker;

use std::fmt;
use std::time::Duration;

pub use adapter::Scoped;
pub use breaker::{CircuitBreaker, NoBreaker};
pub use config::{DEFAULT_CONN_WAIT_TIMEOUT, LockConfig};
pub use handle::Lock;
pub use memory::{MemoryLock, MemoryLocker};
pub use noop::{NoopLock, NoopLocker};
pub use pooled::PooledLocker;
pub use scoped::ScopedLocker;

use crate::cancel::CancellationToken;
use crate::error::Error;

/// Hands out locks with a time to live.
pub trait DistributedLocker: Send + Sync {
    /// Acquires the lock `key` for `ttl`. Asks once; does not wait for the lock.
    ///
    /// # Errors
    ///
    /// In this order of precedence: [`Error::EmptyName`], [`Error::InvalidTtl`] for a `ttl` of
    /// zero or beyond what the locker can keep, [`Error::Closed`], [`Error::CircuitOpen`]; then [`Error::NotAcquired`] if it is held
    /// by somebody, also on this very locker; or what went wrong, after which it is not held.
    fn acquire(&self, key: &str, ttl: Duration) -> Result<Box<dyn DistributedLock>, Error>;

    /// Proves that locks can be had at the moment.
    ///
    /// # Errors
    ///
    /// What is in the way.
    fn ping(&self) -> Result<(), Error>;

    /// Releases every lock that is out; later calls of `acquire` fail with [`Error::Closed`].
    ///
    /// # Errors
    ///
    /// The first error of a release; all are tried.
    fn close(&self) -> Result<(), Error>;
}

/// A lock that was acquired. Dropping it releases it, without blocking.
#[must_use = "dropped at once, it releases the lock at once"]
pub trait DistributedLock: Send + Sync {
    /// The key, as it was given.
    fn key(&self) -> &str;

    /// The time to live, as it was set last.
    fn ttl(&self) -> Duration;

    /// True once the time to live has passed, or the lock was released or found lost. No I/O.
    fn expired(&self) -> bool {
        self.remaining().is_zero()
    }

    /// How long it may be held without a refresh. No I/O.
    fn remaining(&self) -> Duration;

    /// Proves that the lock is held, and starts its time to live anew with `ttl`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidTtl`] for a `ttl` that `acquire` refuses: nothing changes. [`Error::NotHeld`] once it has expired or
    /// was released or lost.
    fn refresh(&self, ttl: Duration) -> Result<(), Error>;

    /// Releases the lock.
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if it was released before, or has expired: it is released all the same.
    fn release(&self) -> Result<(), Error>;
}

/// Runs closures under a lock that lives exactly as long as the closure.
pub trait ScopedLock: Send + Sync {
    /// Waits for the lock `key` until `cancel` is set, runs `f` on the calling thread, and
    /// releases: also if `f` fails or panics.
    ///
    /// # Errors
    ///
    /// [`ScopeError::Job`] with the error of `f`, as it is; [`ScopeError::Lock`] with what kept `f`
    /// from running ([`Error::EmptyName`], [`Error::Cancelled`], ..), or says that the lock may
    /// not have been held until `f` returned ([`Error::Lost`]).
    ///
    /// # Panics
    ///
    /// With the panic of `f`, after the release.
    fn with_lock<T, E, F>(
        &self,
        cancel: &CancellationToken,
        key: &str,
        f: F,
    ) -> Result<T, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>;

    /// Runs `f` as [`with_lock`](ScopedLock::with_lock) does if the lock is free: `None` if it is
    /// held elsewhere.
    ///
    /// # Errors
    ///
    /// As [`with_lock`](ScopedLock::with_lock).
    ///
    /// # Panics
    ///
    /// With the panic of `f`, after the release.
    fn try_with_lock<T, E, F>(&self, key: &str, f: F) -> Result<Option<T>, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>;
}

/// What running a closure under a lock fails with.
#[derive(Clone, Debug)]
pub enum ScopeError<E> {
    /// The closure returned this error; the lock is released.
    Job(E),
    /// The lock could not be had, or was lost while the closure ran, or its release failed.
    Lock(Error),
    /// The closure returned an error, and the lock was lost while it ran, or its release failed: what
    /// it did before it failed may have overlapped another holder's work.
    Both {
        /// The closure's error.
        job: E,
        /// The release's.
        lock: Error,
    },
}

impl<E> ScopeError<E> {
    /// The closure's error, if it returned one.
    #[must_use]
    pub fn into_job(self) -> Option<E> {
        match self {
            ScopeError::Job(job) | ScopeError::Both { job, .. } => Some(job),
            ScopeError::Lock(_) => None,
        }
    }

    /// What was wrong with the lock, if something was.
    #[must_use]
    pub fn lock(&self) -> Option<&Error> {
        match self {
            ScopeError::Lock(lock) | ScopeError::Both { lock, .. } => Some(lock),
            ScopeError::Job(_) => None,
        }
    }
}

impl<E> From<Error> for ScopeError<E> {
    fn from(error: Error) -> ScopeError<E> {
        ScopeError::Lock(error)
    }
}

impl<E: fmt::Display> fmt::Display for ScopeError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScopeError::Job(job) => job.fmt(f),
            ScopeError::Lock(lock) => lock.fmt(f),
            ScopeError::Both { job, lock } => write!(f, "{job}; then the lock: {lock}"),
        }
    }
}

impl<E: std::error::Error> std::error::Error for ScopeError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ScopeError::Job(job) | ScopeError::Both { job, .. } => job.source(),
            ScopeError::Lock(lock) => std::error::Error::source(lock),
        }
    }
}

impl DistributedLocker for PooledLocker {
    fn acquire(&self, key: &str, ttl: Duration) -> Result<Box<dyn DistributedLock>, Error> {
        PooledLocker::acquire(self, key, ttl).map(|lock| Box::new(lock) as _)
    }

    fn ping(&self) -> Result<(), Error> {
        PooledLocker::ping(self)
    }

    fn close(&self) -> Result<(), Error> {
        PooledLocker::close(self)
    }
}

impl DistributedLock for Lock {
    fn key(&self) -> &str {
        Lock::key(self)
    }

    fn ttl(&self) -> Duration {
        Lock::ttl(self)
    }

    fn remaining(&self) -> Duration {
        Lock::remaining(self)
    }

    fn refresh(&self, ttl: Duration) -> Result<(), Error> {
        Lock::refresh(self, ttl)
    }

    fn release(&self) -> Result<(), Error> {
        Lock::release(self)
    }
}

impl ScopedLock for ScopedLocker {
    fn with_lock<T, E, F>(
        &self,
        cancel: &CancellationToken,
        key: &str,
        f: F,
    ) -> Result<T, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>,
    {
        ScopedLocker::with_lock(self, cancel, key, f)
    }

    fn try_with_lock<T, E, F>(&self, key: &str, f: F) -> Result<Option<T>, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>,
    {
        ScopedLocker::try_with_lock(self, key, f)
    }
}
