//! The names in use on one `Locker`: each once, and no two with one key.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, ThreadId};
use std::time::Instant;

use crate::cancel::{CancelReason, CancellationToken};
use crate::error::Error;
use crate::key::Key;

#[derive(Debug)]
struct Entry {
    name: Arc<str>,
    /// A job, for which closing waits, or a guard, for which it does not.
    job: bool,
    /// Where the job runs.
    thread: Option<ThreadId>,
    token: Option<CancellationToken>,
}

#[derive(Default)]
struct State {
    closing: bool,
    entries: HashMap<Key, Entry>,
    /// Called once, when no job is left.
    when_idle: Option<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State")
            .field("closing", &self.closing)
            .field("entries", &self.entries)
            .finish_non_exhaustive()
    }
}

impl State {
    fn has_jobs(&self) -> bool {
        self.entries.values().any(|entry| entry.job)
    }
}

#[derive(Debug)]
pub(crate) struct Registry {
    state: Mutex<State>,
    changed: Condvar,
    process: u32,
}

impl Registry {
    pub(crate) fn new() -> Registry {
        let process = std::process::id();
        Registry { state: Mutex::default(), changed: Condvar::new(), process }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes `name` for as long as the slot lives.
    pub(crate) fn reserve(
        self: &Arc<Registry>,
        name: &str,
        key: Key,
        job: bool,
    ) -> Result<Slot, Error> {
        if name.is_empty() {
            return Err(Error::EmptyName);
        }
        let mut state = self.lock();
        if state.closing {
            return Err(Error::Closed);
        }
        if let Some(other) = state.entries.get(&key) {
            let same = *other.name == *name;
            return Err(if same { Error::AlreadyRunning } else { Error::KeyCollision(key) });
        }
        let name: Arc<str> = name.into();
        let entry = Entry { name: Arc::clone(&name), job, thread: None, token: None };
        state.entries.insert(key, entry);
        Ok(Slot { registry: Arc::clone(self), name, key })
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.lock().closing
    }

    /// Refuses further names, and tells every lease that it should stop.
    pub(crate) fn close(&self) {
        let tokens: Vec<_> = {
            let mut state = self.lock();
            state.closing = true;
            state.entries.values().filter_map(|entry| entry.token.clone()).collect()
        };
        for token in tokens {
            token.cancel_with(CancelReason::Closed);
        }
    }

    /// Calls `f` once no job is left: on the thread of the last one's caller, or now.
    pub(crate) fn when_idle(&self, f: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        if state.has_jobs() {
            state.when_idle = Some(Box::new(f));
        } else {
            drop(state);
            f();
        }
    }

    /// Waits until no job is left, or until `deadline`. Gives the names that are left.
    pub(crate) fn wait_for_jobs(&self, deadline: Option<Instant>) -> Vec<String> {
        let mut state = self.lock();
        loop {
            if !state.has_jobs() {
                return Vec::new();
            }
            let Some(deadline) = deadline else {
                state = self.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
                continue;
            };
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                let jobs = state.entries.values().filter(|entry| entry.job);
                return jobs.map(|entry| entry.name.to_string()).collect();
            }
            state = match self.changed.wait_timeout(state, time) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// True if this thread runs a job of this registry.
    pub(crate) fn on_job_thread(&self) -> bool {
        let me = Some(thread::current().id());
        self.lock().entries.values().any(|entry| entry.thread == me)
    }
}

/// A name in use.
#[derive(Debug)]
pub(crate) struct Slot {
    registry: Arc<Registry>,
    pub(crate) name: Arc<str>,
    pub(crate) key: Key,
}

impl Slot {
    /// Sets whom to tell when the `Locker` closes; tells at once if it is closing.
    pub(crate) fn set_token(&self, token: &CancellationToken) {
        let mut state = self.registry.lock();
        if let Some(entry) = state.entries.get_mut(&self.key) {
            entry.token = Some(token.clone());
        }
        let closing = state.closing;
        drop(state);
        if closing {
            token.cancel_with(CancelReason::Closed);
        }
    }

    /// Notes that the job runs on this thread.
    pub(crate) fn enter_job(&self) {
        if let Some(entry) = self.registry.lock().entries.get_mut(&self.key) {
            entry.thread = Some(thread::current().id());
        }
    }

    /// Notes that the job has returned.
    pub(crate) fn leave_job(&self) {
        if let Some(entry) = self.registry.lock().entries.get_mut(&self.key) {
            entry.thread = None;
            entry.token = None;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // A forked child's copy of the mutex may have been locked at the fork.
        if std::process::id() == self.registry.process {
            let mut state = self.registry.lock();
            state.entries.remove(&self.key);
            let idle = if state.has_jobs() { None } else { state.when_idle.take() };
            drop(state);
            self.registry.changed.notify_all();
            if let Some(idle) = idle {
                idle();
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use std::time::Duration;

    fn registry() -> Arc<Registry> {
        Arc::new(Registry::new())
    }

    #[test]
    fn a_name_is_in_use_until_its_slot_is_dropped() {
        let names = registry();
        let key = Key::from_i64(1);
        let slot = names.reserve("a", key, true).unwrap();
        assert!(matches!(names.reserve("a", key, true), Err(Error::AlreadyRunning)));
        drop(slot);
        names.reserve("a", key, true).unwrap();
    }

    #[test]
    fn two_names_with_one_key_are_an_error_that_names_the_key() {
        let names = registry();
        let _slot = names.reserve("a", Key::from_i64(7), true).unwrap();
        let error = names.reserve("b", Key::from_i64(7), true).unwrap_err();
        assert!(matches!(error, Error::KeyCollision(key) if key.as_i64() == 7));
        assert!(error.to_string().contains('7'));
    }

    #[test]
    fn closing_tells_tokens_set_before_and_after() {
        let names = registry();
        let slot = names.reserve("a", Key::from_i64(1), true).unwrap();
        let (early, late) = (CancellationToken::new(), CancellationToken::new());
        slot.set_token(&early);
        names.close();
        slot.set_token(&late);
        assert_eq!(early.reason(), Some(CancelReason::Closed));
        assert_eq!(late.reason(), Some(CancelReason::Closed));
        assert!(matches!(names.reserve("b", Key::from_i64(2), true), Err(Error::Closed)));
    }

    #[test]
    fn waiting_names_the_jobs_that_are_left_and_skips_guards() {
        let names = registry();
        let _guard = names.reserve("guard", Key::from_i64(2), false).unwrap();
        assert!(names.wait_for_jobs(None).is_empty());
        let _other = names.reserve("other", Key::from_i64(3), true).unwrap();
        let soon = Instant::now() + Duration::from_millis(10);
        assert_eq!(names.wait_for_jobs(Some(soon)), ["other"]);
    }

    #[test]
    fn the_last_job_to_go_calls_what_waits_for_it() {
        let names = registry();
        let jobs = [1, 2].map(|n| names.reserve(&n.to_string(), Key::from_i64(n), true).unwrap());
        let _guard = names.reserve("guard", Key::from_i64(3), false).unwrap();
        let (called, calls) = crossbeam_channel::unbounded();
        names.when_idle(move || called.send(()).unwrap());
        let [first, last] = jobs;
        drop(first);
        assert!(calls.is_empty());
        drop(last);
        assert_eq!(calls.len(), 1);
    }
}
