//! Locks that exclude nobody.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::clock::{Clock, Tick};
use crate::error::Error;
use crate::lock::config::check_ttl;
use crate::lock::{DistributedLock, DistributedLocker};

/// Grants every lock to everybody: for programs that run alone, and for tests.
///
/// Keys, TTLs, expiry and releases are checked as by a real locker. Nothing blocks.
#[derive(Clone, Debug, Default)]
pub struct NoopLocker {
    closed: Arc<AtomicBool>,
}

impl NoopLocker {
    /// A locker that always grants.
    #[must_use]
    pub fn new() -> NoopLocker {
        NoopLocker::default()
    }
}

impl DistributedLocker for NoopLocker {
    fn acquire(&self, key: &str, ttl: Duration) -> Result<Box<dyn DistributedLock>, Error> {
        if key.is_empty() {
            return Err(Error::EmptyName);
        }
        check_ttl(ttl)?;
        self.ping()?;
        let (clock, closed) = (Clock::System, Arc::clone(&self.closed));
        let term = Mutex::new((ttl, Some(clock.now().after(ttl))));
        Ok(Box::new(NoopLock { key: key.into(), clock, closed, term }))
    }

    fn ping(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::SeqCst) { Err(Error::Closed) } else { Ok(()) }
    }

    fn close(&self) -> Result<(), Error> {
        self.closed.store(true, Ordering::SeqCst);
        Ok(())
    }
}

/// A lock of a [`NoopLocker`].
pub struct NoopLock {
    key: Box<str>,
    clock: Clock,
    closed: Arc<AtomicBool>,
    /// The TTL as set last, and when it passes; `None` once released.
    term: Mutex<(Duration, Option<Tick>)>,
}

impl NoopLock {
    fn term(&self) -> MutexGuard<'_, (Duration, Option<Tick>)> {
        self.term.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl DistributedLock for NoopLock {
    fn key(&self) -> &str {
        &self.key
    }

    fn ttl(&self) -> Duration {
        self.term().0
    }

    fn remaining(&self) -> Duration {
        match self.term().1 {
            Some(deadline) if !self.closed.load(Ordering::SeqCst) => {
                deadline.since(self.clock.now())
            }
            _ => Duration::ZERO,
        }
    }

    fn refresh(&self, ttl: Duration) -> Result<(), Error> {
        check_ttl(ttl)?;
        if self.expired() {
            return Err(Error::NotHeld);
        }
        *self.term() = (ttl, Some(self.clock.now().after(ttl)));
        Ok(())
    }

    fn release(&self) -> Result<(), Error> {
        let expired = self.expired();
        let released = self.term().1.take().is_none();
        if expired || released { Err(Error::NotHeld) } else { Ok(()) }
    }
}

impl fmt::Debug for NoopLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NoopLock").field("key", &self.key).finish_non_exhaustive()
    }
}
