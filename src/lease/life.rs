//! The life of one session, as its leases see it.
//!
//! # Protocol
//!
//! A life ends once, and never starts again: the next session is another life. It ends because the
//! owner thread saw the session end, or because anyone (the watchdog, or a job that asks its lease)
//! saw the deadline pass. The deadline is kept twice: under the mutex, where it decides, and in an
//! atomic, from which [`Life::deadline`] reads without blocking. An answer moves it only while it
//! has not passed; both are decided under the mutex, so a lease that once said "not held" never
//! says "held" again.
//!
//! Lock order: this mutex, then nothing. Leases are told after it was released.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::clock::{Clock, Tick};
use crate::error::{Error, LostReason};
use crate::event::{Event, Events};
use crate::key::Key;
use crate::lease::lease::Core;
use crate::session::Facts;

#[derive(Debug)]
struct State {
    ended: Option<LostReason>,
    last_good: Tick,
    leases: HashMap<Key, Arc<Core>>,
}

/// When a heartbeat is due, and how long a statement may take.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Pace {
    pub(crate) heartbeat_interval: Duration,
    pub(crate) query_timeout: Duration,
}

impl Pace {
    /// From the start of an answered statement to the loss.
    pub(crate) fn window(self) -> Duration {
        self.heartbeat_interval.saturating_add(self.query_timeout)
    }
}

/// One session's life: its leases, its deadline, its end.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) facts: Facts,
    pub(crate) clock: Clock,
    pub(crate) pace: Pace,
    /// Nanoseconds; 0 once the life has ended.
    deadline: AtomicU64,
    state: Mutex<State>,
    events: Events,
}

impl Life {
    pub(crate) fn new(
        facts: Facts,
        clock: Clock,
        pace: Pace,
        last_good: Tick,
        events: Events,
    ) -> Life {
        let deadline = AtomicU64::new(last_good.after(pace.window()).as_nanos());
        let state = Mutex::new(State { ended: None, last_good, leases: HashMap::new() });
        Life { facts, clock, pace, deadline, state, events }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.facts.pid
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// When the leases are lost unless something is answered before; [`Tick::ZERO`] if they are.
    pub(crate) fn deadline(&self) -> Tick {
        Tick::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// The start of the last statement that was answered.
    pub(crate) fn last_good(&self) -> Tick {
        self.lock().last_good
    }

    /// Why the life ended, if it did.
    pub(crate) fn ended(&self) -> Option<LostReason> {
        self.lock().ended
    }

    pub(crate) fn keys(&self) -> Vec<i64> {
        self.lock().leases.keys().map(|key| key.as_i64()).collect()
    }

    pub(crate) fn leases(&self) -> Vec<Arc<Core>> {
        self.lock().leases.values().map(Arc::clone).collect()
    }

    pub(crate) fn lease(&self, key: Key) -> Option<Arc<Core>> {
        self.lock().leases.get(&key).map(Arc::clone)
    }

    pub(crate) fn holds(&self, key: Key) -> bool {
        self.lock().leases.contains_key(&key)
    }

    pub(crate) fn lease_count(&self) -> usize {
        self.lock().leases.len()
    }

    /// A statement that started at `start` was answered: moves the deadline. False if it had passed.
    pub(crate) fn extend(&self, start: Tick) -> bool {
        let mut state = self.lock();
        if state.ended.is_some() {
            return false;
        }
        let passed = self.clock.now() >= state.last_good.after(self.pace.window());
        if passed && !state.leases.is_empty() {
            drop(state);
            self.end(LostReason::NoAnswer, None);
            return false;
        }
        state.last_good = state.last_good.max(start);
        self.deadline
            .store(state.last_good.after(self.pace.window()).as_nanos(), Ordering::Release);
        true
    }

    /// Puts a lease under this life. True if it is the first one. Refused, with the reason, if the
    /// life has ended, or if it has a lease of this key already: then the session holds the lock
    /// twice, and a release of either would not free it.
    pub(crate) fn register(&self, core: Arc<Core>) -> Result<bool, LostReason> {
        let mut state = self.lock();
        if let Some(reason) = state.ended {
            return Err(reason);
        }
        let first = state.leases.is_empty();
        match state.leases.entry(core.key) {
            Entry::Occupied(_) => Err(LostReason::InDoubt),
            Entry::Vacant(place) => {
                place.insert(core);
                Ok(first)
            }
        }
    }

    /// Takes a lease out, because it was released. Another of the same key stays.
    pub(crate) fn remove(&self, core: &Arc<Core>) {
        let mut state = self.lock();
        if state.leases.get(&core.key).is_some_and(|there| Arc::ptr_eq(there, core)) {
            state.leases.remove(&core.key);
        }
    }

    /// Ends the life if its deadline has passed.
    pub(crate) fn end_if_passed(&self) -> bool {
        {
            let state = self.lock();
            if state.ended.is_some() || state.leases.is_empty() {
                return false;
            }
            if self.clock.now() < state.last_good.after(self.pace.window()) {
                return false;
            }
        }
        // An answer cannot come in between: `extend` finds the deadline passed, too.
        self.end(LostReason::NoAnswer, None)
    }

    /// Ends the life, and tells each of its leases, once. False if it had ended before.
    pub(crate) fn end(&self, reason: LostReason, error: Option<Error>) -> bool {
        let leases = {
            let mut state = self.lock();
            if state.ended.is_some() {
                return false;
            }
            state.ended = Some(reason);
            self.deadline.store(0, Ordering::Release);
            std::mem::take(&mut state.leases)
        };
        self.events.send(Event::SessionLost {
            pid: self.pid(),
            reason,
            error,
            leases: leases.len(),
        });
        for core in leases.values() {
            core.lose(reason, &self.events);
        }
        true
    }

    /// Ends the life in good order: no lease is left on it.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        if state.ended.is_none() {
            state.ended = Some(LostReason::SessionEnded);
            self.deadline.store(0, Ordering::Release);
            state.leases.clear();
            drop(state);
            self.events.send(Event::SessionClosed { pid: self.pid() });
        }
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use crate::cancel::{CancelReason, CancellationToken};
    use crate::lease::lease::Lease;
    use crate::token::FencingToken;

    const WINDOW: Duration = Duration::from_secs(15);

    fn life() -> Arc<Life> {
        let clock = Clock::fake();
        let (events, _thread) = Events::start(None).unwrap();
        let now = clock.now();
        let pace = Pace { heartbeat_interval: WINDOW / 3, query_timeout: WINDOW * 2 / 3 };
        Arc::new(Life::new(Facts::default(), clock, pace, now, events))
    }

    fn lease_on(life: &Arc<Life>, name: &str) -> Lease {
        let key = Key::new(0, name);
        let token = FencingToken::new(1, 1).unwrap();
        let cancellation = CancellationToken::new();
        let core = Core::new(name.into(), key, token, Arc::clone(life), cancellation);
        let core = Arc::new(core);
        life.register(Arc::clone(&core)).unwrap();
        Lease { core }
    }

    #[test]
    fn a_lease_is_lost_by_the_clock_alone_and_stays_lost() {
        let life = life();
        let lease = lease_on(&life, "a");
        life.clock.advance(WINDOW - Duration::from_nanos(1));
        assert!(lease.is_held());
        assert_eq!(lease.remaining(), Duration::from_nanos(1));
        life.clock.advance(Duration::from_nanos(1));
        assert!(!lease.is_held());
        assert_eq!(lease.remaining(), Duration::ZERO);
        assert!(matches!(lease.check(), Err(Error::Lost(LostReason::NoAnswer))));
        assert!(lease.cancellation().is_cancelled(), "the token is set by whoever looks first");
        assert!(!life.extend(life.clock.now()), "an answer after the deadline comes too late");
        assert!(!lease.is_held());
    }

    #[test]
    fn the_deadline_counts_from_the_start_of_the_statement_not_from_its_answer() {
        let life = life();
        let lease = lease_on(&life, "a");
        let start = life.clock.now();
        life.clock.advance(Duration::from_secs(9));
        assert!(life.extend(start));
        assert_eq!(lease.remaining(), Duration::from_secs(6));
    }

    #[test]
    fn an_older_answer_does_not_move_the_deadline_back() {
        let life = life();
        let lease = lease_on(&life, "a");
        let old = life.clock.now();
        life.clock.advance(Duration::from_secs(5));
        assert!(life.extend(life.clock.now()));
        assert!(life.extend(old));
        assert_eq!(lease.remaining(), WINDOW);
    }

    #[test]
    fn every_lease_is_told_once_and_a_released_one_is_not() {
        let life = life();
        let (lost, released) = (lease_on(&life, "a"), lease_on(&life, "b"));
        assert!(released.core.begin_release());
        assert!(life.end(LostReason::SessionEnded, None));
        assert!(!life.end(LostReason::NoAnswer, None));
        let reason = lost.cancellation().reason();
        assert_eq!(reason, Some(CancelReason::Lost(LostReason::SessionEnded)));
        assert!(matches!(lost.check(), Err(Error::Lost(LostReason::SessionEnded))));
        assert_eq!(released.cancellation().reason(), None);
        assert!(matches!(released.check(), Err(Error::NotHeld)));
    }

    #[test]
    fn a_session_without_leases_has_no_deadline_to_miss() {
        let life = life();
        life.clock.advance(WINDOW * 10);
        assert!(!life.end_if_passed());
        assert!(life.extend(life.clock.now()));
        assert!(lease_on(&life, "a").is_held());
    }

    #[test]
    fn nothing_is_put_under_a_life_that_ended() {
        let life = life();
        let lease = lease_on(&life, "a");
        life.end(LostReason::SessionEnded, None);
        let refused = life.register(Arc::clone(&lease.core));
        assert_eq!(refused, Err(LostReason::SessionEnded));
    }

    #[test]
    fn a_second_lease_of_one_key_is_refused_and_cannot_take_the_first_out() {
        let life = life();
        let lease = lease_on(&life, "a");
        let (token, cancellation) = (lease.core.token, CancellationToken::new());
        let second =
            Arc::new(Core::new("a".into(), lease.core.key, token, Arc::clone(&life), cancellation));
        assert_eq!(life.register(Arc::clone(&second)), Err(LostReason::InDoubt));
        life.remove(&second);
        life.end(LostReason::SessionEnded, None);
        assert!(lease.cancellation().is_cancelled(), "the first is told all the same");
    }

    #[test]
    fn a_term_is_either_lost_or_released() {
        for _ in 0..200 {
            let life = life();
            let lease = lease_on(&life, "a");
            let ender = Arc::clone(&life);
            let thread = std::thread::spawn(move || ender.end(LostReason::SessionEnded, None));
            let released = lease.core.begin_release();
            thread.join().unwrap();
            assert_ne!(released, lease.cancellation().is_cancelled());
        }
    }
}
