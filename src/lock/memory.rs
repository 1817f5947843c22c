//! Locks of one process, with a real TTL: for tests of code that takes locks.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::clock::{Clock, Tick};
use crate::error::Error;
use crate::lock::config::check_ttl;
use crate::lock::{DistributedLock, DistributedLocker};

struct Entry {
    id: u64,
    locker: u64,
    ttl: Duration,
    deadline: Tick,
}

#[derive(Default)]
struct Table {
    next: u64,
    entries: HashMap<Arc<str>, Entry>,
}

/// What lockers that see each other share.
struct Store {
    clock: Clock,
    table: Mutex<Table>,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Locks in the memory of this process: exclusive, with a TTL, gone when the process ends.
///
/// For tests of code that takes a [`DistributedLocker`], without a database. Clones are the same
/// locker; a [`peer`](MemoryLocker::peer) is another one that contends for the same keys, as a
/// second process would. Nothing blocks.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use leasehold::Error;
/// use leasehold::lock::{DistributedLocker, MemoryLocker};
///
/// let here = MemoryLocker::new();
/// let there = here.peer();
/// let ttl = Duration::from_secs(30);
/// let lock = here.acquire("report-7", ttl)?;
/// assert!(matches!(there.acquire("report-7", ttl), Err(Error::NotAcquired)));
/// lock.release()?;
/// drop(there.acquire("report-7", ttl)?);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct MemoryLocker {
    store: Arc<Store>,
    id: u64,
    closed: Arc<AtomicBool>,
}

impl MemoryLocker {
    /// A locker that shares its keys with no other.
    #[must_use]
    pub fn new() -> MemoryLocker {
        MemoryLocker::on(Clock::System)
    }

    fn on(clock: Clock) -> MemoryLocker {
        let store = Arc::new(Store { clock, table: Mutex::default() });
        MemoryLocker { store, id: 0, closed: Arc::default() }.peer()
    }

    /// Another locker that contends for the same keys, and is closed on its own.
    #[must_use]
    pub fn peer(&self) -> MemoryLocker {
        let mut table = self.store.lock();
        table.next += 1;
        MemoryLocker { store: Arc::clone(&self.store), id: table.next, closed: Arc::default() }
    }
}

impl Default for MemoryLocker {
    fn default() -> MemoryLocker {
        MemoryLocker::new()
    }
}

impl DistributedLocker for MemoryLocker {
    fn acquire(&self, key: &str, ttl: Duration) -> Result<Box<dyn DistributedLock>, Error> {
        if key.is_empty() {
            return Err(Error::EmptyName);
        }
        check_ttl(ttl)?;
        let mut table = self.store.lock();
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::Closed);
        }
        let now = self.store.clock.now();
        if table.entries.get(key).is_some_and(|entry| entry.deadline > now) {
            return Err(Error::NotAcquired);
        }
        table.next += 1;
        let (id, key) = (table.next, Arc::<str>::from(key));
        let entry = Entry { id, locker: self.id, ttl, deadline: now.after(ttl) };
        table.entries.insert(Arc::clone(&key), entry);
        let store = Arc::clone(&self.store);
        Ok(Box::new(MemoryLock { store, key, id, last: Mutex::new(ttl) }))
    }

    fn ping(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::SeqCst) { Err(Error::Closed) } else { Ok(()) }
    }

    fn close(&self) -> Result<(), Error> {
        let mut table = self.store.lock();
        self.closed.store(true, Ordering::SeqCst);
        table.entries.retain(|_, entry| entry.locker != self.id);
        Ok(())
    }
}

/// A lock of a [`MemoryLocker`].
pub struct MemoryLock {
    store: Arc<Store>,
    key: Arc<str>,
    id: u64,
    /// The TTL as set last, for when the entry is gone.
    last: Mutex<Duration>,
}

impl MemoryLock {
    /// Works on the entry if it is still this lock's. `None` if it is not.
    fn entry<R>(&self, work: impl FnOnce(&mut Entry, Tick) -> R) -> Option<R> {
        let mut table = self.store.lock();
        let now = self.store.clock.now();
        let entry = table.entries.get_mut(&self.key).filter(|entry| entry.id == self.id)?;
        Some(work(entry, now))
    }
}

impl DistributedLock for MemoryLock {
    fn key(&self) -> &str {
        &self.key
    }

    fn ttl(&self) -> Duration {
        *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn remaining(&self) -> Duration {
        self.entry(|entry, now| entry.deadline.since(now)).unwrap_or_default()
    }

    fn refresh(&self, ttl: Duration) -> Result<(), Error> {
        check_ttl(ttl)?;
        let alive = self.entry(|entry, now| {
            let alive = entry.deadline > now;
            if alive {
                entry.ttl = ttl;
                entry.deadline = now.after(ttl);
            }
            alive
        });
        if alive != Some(true) {
            return Err(Error::NotHeld);
        }
        *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = ttl;
        Ok(())
    }

    fn release(&self) -> Result<(), Error> {
        let mut table = self.store.lock();
        let now = self.store.clock.now();
        match table.entries.get(&self.key) {
            Some(entry) if entry.id == self.id => {
                let alive = entry.deadline > now;
                table.entries.remove(&self.key);
                if alive { Ok(()) } else { Err(Error::NotHeld) }
            }
            _ => Err(Error::NotHeld),
        }
    }
}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        // It may have been released, or lapsed, before.
        self.release().unwrap_or_default();
    }
}

impl fmt::Debug for MemoryLocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys: Vec<_> = self.store.lock().entries.keys().cloned().collect();
        f.debug_struct("MemoryLocker").field("keys", &keys).finish_non_exhaustive()
    }
}

impl fmt::Debug for MemoryLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remaining = self.remaining();
        f.debug_struct("MemoryLock")
            .field("key", &self.key)
            .field("remaining", &remaining)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    #[test]
    fn a_lapsed_lock_is_anothers_to_take_and_its_handle_touches_nothing() {
        let clock = Clock::fake();
        let here = MemoryLocker::on(clock.clone());
        let there = here.peer();
        let old = here.acquire("k", TTL).unwrap();
        clock.advance(TTL - Duration::from_nanos(1));
        assert!(!old.expired() && there.acquire("k", TTL).is_err());
        clock.advance(Duration::from_nanos(1));
        assert!(old.expired());
        let new = there.acquire("k", TTL).unwrap();
        assert!(matches!(old.refresh(TTL), Err(Error::NotHeld)));
        assert!(matches!(old.release(), Err(Error::NotHeld)));
        drop(old);
        assert_eq!(new.remaining(), TTL);
    }

    #[test]
    fn a_close_frees_the_keys_of_its_own_locker_only() {
        let here = MemoryLocker::new();
        let there = here.peer();
        let mine = here.acquire("mine", TTL).unwrap();
        let theirs = there.acquire("theirs", TTL).unwrap();
        here.close().unwrap();
        assert!(mine.expired() && !theirs.expired());
        assert!(matches!(here.acquire("k", TTL).map(drop), Err(Error::Closed)));
        drop(there.acquire("mine", TTL).unwrap());
    }
}
