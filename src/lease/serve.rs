//! Trying for leases, and what follows from the outcome.
//!
//! The rule behind all of it: after an error the outcome of a statement is unknown. The same session
//! is asked which locks it holds, and if that fails too, it is closed, which ends all doubt.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cancel::CancelReason;
use crate::clock::Tick;
use crate::error::{Error, LostReason};
use crate::event::Event;
use crate::key::Key;
use crate::lease::fence::{Fenced, fence};
use crate::lease::lease::{Core, Held};
use crate::lease::mailbox::{Acquire, Answer};
use crate::lease::owner::{Owner, Waiting};
use crate::session::Granted;
use crate::token::FencingToken;

impl Owner {
    /// Takes in messages of the server and notices its end.
    pub(crate) fn listen(&mut self, limit: Duration) {
        let Some(live) = &mut self.live else { return };
        match live.session.park(limit) {
            Ok(messages) => {
                let broken = live.session.is_broken();
                for message in messages {
                    self.hear(&message);
                }
                if broken {
                    self.lose(LostReason::SessionEnded, None);
                }
            }
            Err(error) => self.lose(LostReason::SessionEnded, Some(error)),
        }
    }

    /// `r` and a key: released. `s`, a key and a nonce: whoever holds it is asked to step down. `a`
    /// and a nonce: the holder has heard. Anything else is not ours.
    fn hear(&mut self, message: &str) {
        let Some((kind, rest)) = message.split_at_checked(1) else { return };
        match kind {
            "r" => {
                let Ok(key) = rest.parse() else { return };
                self.try_soon(Key::from_i64(key));
            }
            "s" => {
                let Some((key, nonce)) = rest.split_once(' ') else { return };
                let Ok(key) = key.parse() else { return };
                self.hear_step_down(Key::from_i64(key), nonce);
            }
            "a" => {
                let answered = self.awaited.iter().position(|each| each.nonce == rest);
                if let Some(at) = answered {
                    let answer = self.awaited.swap_remove(at);
                    self.reply(&answer.reply, Ok(true));
                }
            }
            _ => {}
        }
    }

    /// Tries for a lease that is said to be free.
    pub(crate) fn try_soon(&mut self, key: Key) {
        let due = self.spread();
        if let Some(waiting) = self.waiting.get_mut(&key) {
            waiting.due = Some(waiting.due.map_or(due, |sooner| sooner.min(due)));
        }
    }

    fn hear_step_down(&mut self, key: Key, nonce: &str) {
        let held = self.live.as_ref().and_then(|live| live.life.lease(key));
        if let (Some(core), true) = (held, self.setup.options.allow_step_down) {
            core.cancellation.cancel_with(CancelReason::StepDown);
            self.inbox.heard_step_downs.push(nonce.to_owned());
        }
    }

    /// A statement that started at `start` was answered.
    pub(crate) fn answered(&mut self, start: Tick) {
        if let Some(live) = &self.live {
            if !live.life.extend(start) {
                self.lose(LostReason::NoAnswer, None);
            }
        }
    }

    /// A statement failed. True if the session is still good.
    pub(crate) fn survived(&mut self, error: &Error) -> bool {
        let broken = self.live.as_ref().is_none_or(|live| live.session.is_broken());
        if broken {
            let silent = matches!(error, Error::Timeout(_));
            let reason = if silent { LostReason::NoAnswer } else { LostReason::SessionEnded };
            self.lose(reason, Some(error.clone()));
        }
        !broken
    }

    /// Tries for everything that is due, in one statement.
    pub(crate) fn serve_tries(&mut self) {
        let mut tries = std::mem::take(&mut self.inbox.tries);
        let now = Instant::now();
        let all = self.retry_is_due();
        if all {
            self.schedule_retry();
        }
        // A lock that this session has would be granted again, and be held twice: whoever waits for
        // it is tried after its release.
        let live = self.live.as_ref();
        let ours = |key| live.is_some_and(|live| live.life.holds(key));
        let due: Vec<Key> = self
            .waiting
            .iter_mut()
            .filter(|(_, waiting)| all || waiting.due.is_some_and(|due| due <= now))
            .filter(|(key, _)| !ours(**key))
            .map(|(key, waiting)| {
                waiting.due = None;
                *key
            })
            .collect();
        // A name whose release was not confirmed is still this session's: it cannot be won again.
        tries.retain(|acquire| {
            let again = ours(acquire.key);
            if again {
                self.answer(acquire, Answer::Failed(Error::AlreadyRunning));
            }
            !again
        });
        let keys: Vec<i64> =
            tries.iter().map(|acquire| acquire.key).chain(due).map(Key::as_i64).collect();
        if !keys.is_empty() {
            let mut once = tries.into_iter().map(|acquire| (acquire.key, acquire)).collect();
            self.try_keys(&keys, &mut once);
            // What was not granted and not failed is held elsewhere, or its session is gone.
            for acquire in once.into_values() {
                self.answer(&acquire, Answer::Failed(Error::Lost(LostReason::SessionEnded)));
            }
        }
    }

    /// Tries `keys`; those in `once` are answered and taken out, the others are standing wishes.
    fn try_keys(&mut self, keys: &[i64], once: &mut HashMap<Key, Acquire>) {
        let Some(live) = &mut self.live else { return };
        let idle = live.idle.as_ref().map(|(held, _)| held.as_str());
        let fences: Vec<i64> = keys.iter().map(|key| fence(Key::from_i64(*key))).collect();
        let start = live.life.clock.now();
        match live.session.try_lock(keys, &fences, idle) {
            Ok(granted) => {
                self.answered(start);
                self.grant(keys, &granted, once);
            }
            Err(error) => {
                if self.survived(&error) && !self.clean_up(keys) {
                    self.lose(LostReason::InDoubt, Some(error.clone()));
                }
                // A full lock table has room for some: find out for which.
                if matches!(error, Error::LockTableFull) && keys.len() > 1 {
                    let (left, right) = keys.split_at(keys.len() / 2);
                    self.try_keys(left, once);
                    self.try_keys(right, once);
                } else {
                    self.trying_failed(keys, &error, once);
                }
            }
        }
    }

    /// After an error any of `keys` may be locked: unlocks those that are. False if that is not
    /// known to have worked.
    fn clean_up(&mut self, keys: &[i64]) -> bool {
        let Some(live) = &mut self.live else { return true };
        let start = live.life.clock.now();
        let cleaned = live.session.ask(keys).and_then(|held| {
            if held.is_empty() { Ok(Vec::new()) } else { live.session.unlock_quietly(&held) }
        });
        if cleaned.as_ref().is_ok_and(Vec::is_empty) {
            self.answered(start);
            return true;
        }
        false
    }

    fn trying_failed(&mut self, keys: &[i64], error: &Error, once: &mut HashMap<Key, Acquire>) {
        self.setup.events.send(Event::TryFailed { error: error.clone() });
        for key in keys.iter().copied().map(Key::from_i64) {
            if let Some(acquire) = once.remove(&key) {
                self.answer(&acquire, Answer::Failed(error.clone()));
            } else if let Some(waiting) = self.waiting.get(&key) {
                waiting.acquire.trouble(error);
                if !error.is_retryable() {
                    self.answer(&waiting.acquire, Answer::Failed(error.clone()));
                    self.waiting.remove(&key);
                }
            }
        }
    }

    fn grant(&mut self, keys: &[i64], granted: &Granted, once: &mut HashMap<Key, Acquire>) {
        for value in keys {
            let key = Key::from_i64(*value);
            let won = granted.token.filter(|_| granted.keys.contains(value));
            let fenced = granted.fenced.contains(value);
            match (won, once.remove(&key)) {
                (Some(token), Some(acquire)) => self.begin_term(acquire, token, fenced),
                (None, Some(acquire)) => self.answer(&acquire, Answer::Refused),
                (Some(token), None) => {
                    if let Some(waiting) = self.waiting.remove(&key) {
                        self.begin_term(waiting.acquire, token, fenced);
                    }
                }
                (None, None) => self.refuse(key),
            }
        }
    }

    /// Tells a standing wish, once, that it has to wait.
    fn refuse(&mut self, key: Key) {
        if let Some(watch) = &self.setup.watch {
            watch.refused();
        }
        let Some(waiting) = self.waiting.get_mut(&key) else { return };
        *waiting.acquire.trouble.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
        if !std::mem::replace(&mut waiting.told, true) {
            let name = Arc::clone(&waiting.acquire.name);
            self.setup.events.send(Event::Waiting { name, key });
            let acquire = &self.waiting[&key].acquire;
            self.answer(acquire, Answer::Refused);
        }
    }

    /// The lock is granted: puts the lease under its session's life, and starts the term unless the
    /// fence is busy.
    fn begin_term(&mut self, acquire: Acquire, token: FencingToken, fenced: bool) {
        let Some(live) = &self.live else {
            return self.not_begun(acquire, LostReason::SessionEnded);
        };
        let life = Arc::clone(&live.life);
        let name = Arc::clone(&acquire.name);
        let cancellation = acquire.cancel.child_token();
        let core = Core::new(name, acquire.key, token, Arc::clone(&life), cancellation);
        let core = Arc::new(core);
        let first = match life.register(Arc::clone(&core)) {
            Ok(first) => first,
            Err(reason) => {
                self.lose(reason, None);
                return self.not_begun(acquire, reason);
            }
        };
        if first && self.setup.watchdog.send(life).is_err() {
            log::error!(target: "leasehold", "the watchdog thread is gone");
        }
        if fenced {
            self.fences_at = Instant::now();
            self.fenced.push(Fenced::new(acquire, core));
        } else {
            self.start_term(acquire, core);
        }
    }

    /// The session was lost before the term began: a standing wish goes on, another has failed.
    pub(crate) fn not_begun(&mut self, acquire: Acquire, reason: LostReason) {
        if acquire.standing {
            self.waiting.insert(acquire.key, Waiting { acquire, due: None, told: true });
        } else {
            self.answer(&acquire, Answer::Failed(Error::Lost(reason)));
        }
    }

    /// Hands the lease out.
    pub(crate) fn start_term(&self, acquire: Acquire, core: Arc<Core>) {
        self.setup.events.send(Event::Acquired {
            name: Arc::clone(&core.name),
            key: core.key,
            pid: core.life.pid(),
            token: core.token,
        });
        let held = Held::new(core, Arc::clone(&acquire.mailbox));
        self.answer(&acquire, Answer::Granted(held));
    }
}
