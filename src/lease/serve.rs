//! What the owner thread does with requests: statements, and what follows from their outcomes.
//!
//! The rule behind all of it: after an error the outcome of a statement is unknown. The same session
//! is asked which locks it holds, and if that fails too, it is closed, which ends all doubt.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crate::clock::Tick;
use crate::error::{Error, LostReason};
use crate::event::Event;
use crate::key::Key;
use crate::lease::lease::{Core, Held};
use crate::lease::mailbox::{Acquire, Answer, Reply};
use crate::lease::owner::Owner;
use crate::session::{Granted, Pulse};

/// A lease to give back.
pub(crate) struct Release {
    pub(crate) core: Arc<Core>,
    pub(crate) reply: Option<Reply<()>>,
}

impl Owner {
    /// Takes in messages of the server and notices its end.
    pub(crate) fn listen(&mut self, limit: std::time::Duration) {
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

    fn hear(&mut self, message: &str) {
        let Some(key) = message.strip_prefix('r').and_then(|key| key.parse().ok()) else { return };
        let due = self.spread();
        if let Some(waiting) = self.waiting.get_mut(&Key::from_i64(key)) {
            waiting.due = Some(waiting.due.map_or(due, |sooner| sooner.min(due)));
        }
    }

    /// Unlocks what was given back, in one statement.
    pub(crate) fn serve_releases(&mut self) {
        let (mine, stale): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.inbox.releases).into_iter().partition(|release| {
                let live = self.live.as_ref();
                live.is_some_and(|live| Arc::ptr_eq(&live.life, &release.core.life))
            });
        // A lease of an earlier session is gone with it: nothing of the present one is touched.
        for release in stale {
            let lost = release.core.life.ended().unwrap_or(LostReason::SessionEnded);
            self.released(release, Err(Error::Lost(lost)));
        }
        if !mine.is_empty() {
            self.unlock(mine);
        }
    }

    fn unlock(&mut self, releases: Vec<Release>) {
        let Some(live) = &mut self.live else { return };
        let keys: Vec<i64> = releases.iter().map(|release| release.core.key.as_i64()).collect();
        let last = live.life.lease_count() <= keys.len();
        let idle = live.idle.as_ref().filter(|_| last).map(|(_, idle)| idle.as_str());
        let start = live.life.clock.now();
        let outcome = live.session.unlock(&keys, idle);
        let doubtful = match outcome {
            Ok(missing) => Ok(missing),
            Err(error) if live.session.is_broken() => Err(error),
            // The unlock may have happened and only the notification failed: look.
            Err(error) => live.session.ask(&keys).and_then(|still| {
                self.setup.events.send(Event::TryFailed { error });
                live.session.unlock_quietly(&still)
            }),
        };
        match doubtful {
            Ok(missing) => {
                self.answered(start);
                let in_doubt = !missing.is_empty();
                for release in releases {
                    let held = !missing.contains(&release.core.key.as_i64());
                    self.released(release, if held { Ok(()) } else { Err(Error::NotHeld) });
                }
                if in_doubt {
                    self.lose(LostReason::InDoubt, None);
                }
            }
            Err(error) => {
                for release in releases {
                    self.released(release, Err(error.clone()));
                }
                self.lose(LostReason::InDoubt, Some(error));
            }
        }
    }

    /// Ends a lease's release: `Ok` if the server confirmed it.
    fn released(&self, release: Release, outcome: Result<(), Error>) {
        let Release { core, reply } = release;
        let (name, key, pid) = (Arc::clone(&core.name), core.key, core.life.pid);
        let event = match &outcome {
            Ok(()) => Event::Released { name, key, pid, token: core.token },
            Err(Error::NotHeld) => Event::ReleaseFailed { name, key, pid, error: None },
            Err(error) => Event::ReleaseFailed { name, key, pid, error: Some(error.clone()) },
        };
        core.ended();
        core.life.remove(core.key);
        self.setup.events.send(event);
        if let Some(reply) = reply {
            self.reply(&reply, outcome);
        }
    }

    /// A statement that started at `start` was answered.
    fn answered(&mut self, start: Tick) {
        if let Some(live) = &self.live {
            if !live.life.extend(start) {
                self.lose(LostReason::NoAnswer, None);
            }
        }
    }

    /// A statement failed. True if the session is still good.
    fn survived(&mut self, error: &Error) -> bool {
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
        let due: Vec<Key> = self
            .waiting
            .iter_mut()
            .filter(|(_, waiting)| all || waiting.due.is_some_and(|due| due <= now))
            .map(|(key, waiting)| {
                waiting.due = None;
                *key
            })
            .collect();
        // A name whose release was not confirmed is still this session's: it cannot be won again.
        tries.retain(|acquire| {
            let ours = self.live.as_ref().is_some_and(|live| live.life.holds(acquire.key));
            if ours {
                self.answer(acquire, Answer::Failed(Error::AlreadyRunning));
            }
            !ours
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
        let start = live.life.clock.now();
        match live.session.try_lock(keys, idle) {
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
        for key in keys.iter().copied() {
            let won = granted.keys.contains(&key).then_some(granted.token).flatten();
            let key = Key::from_i64(key);
            match (won, once.remove(&key)) {
                (Some(token), Some(acquire)) => self.begin_term(acquire, token),
                (None, Some(acquire)) => self.answer(&acquire, Answer::Refused),
                (Some(token), None) => {
                    if let Some(waiting) = self.waiting.remove(&key) {
                        self.begin_term(waiting.acquire, token);
                    }
                }
                (None, None) => self.refuse(key),
            }
        }
    }

    /// Tells a standing wish, once, that it has to wait.
    fn refuse(&mut self, key: Key) {
        let Some(waiting) = self.waiting.get_mut(&key) else { return };
        *waiting.acquire.trouble.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
        if !std::mem::replace(&mut waiting.told, true) {
            let name = Arc::clone(&waiting.acquire.name);
            self.setup.events.send(Event::Waiting { name, key });
            let acquire = &self.waiting[&key].acquire;
            self.answer(acquire, Answer::Refused);
        }
    }

    fn begin_term(&mut self, acquire: Acquire, token: crate::token::FencingToken) {
        let Some(live) = &self.live else {
            let lost = Error::Lost(LostReason::SessionEnded);
            return self.answer(&acquire, Answer::Failed(lost));
        };
        let life = Arc::clone(&live.life);
        let name = Arc::clone(&acquire.name);
        let cancellation = acquire.cancel.child_token();
        let core = Core::new(name, acquire.key, token, Arc::clone(&life), cancellation);
        let core = Arc::new(core);
        let (name, key, pid) = (Arc::clone(&core.name), core.key, life.pid);
        match life.register(Arc::clone(&core)) {
            Some(first) => {
                if first && self.setup.watchdog.send(Arc::clone(&life)).is_err() {
                    log::error!(target: "leasehold", "the watchdog thread is gone");
                }
                self.setup.events.send(Event::Acquired { name, key, pid, token });
                let held = Held::new(core, Arc::clone(&acquire.mailbox));
                self.answer(&acquire, Answer::Granted(held));
            }
            None => {
                let reason = life.ended().unwrap_or(LostReason::NoAnswer);
                self.answer(&acquire, Answer::Failed(Error::Lost(reason)));
            }
        }
    }

    /// Answers those who ask about the server.
    pub(crate) fn serve_questions(&mut self) {
        for (reply, expires) in std::mem::take(&mut self.inbox.pings) {
            if Instant::now() < expires {
                let outcome = self.beat();
                self.reply(&reply, outcome);
            }
        }
        for (key, reply, expires) in std::mem::take(&mut self.inbox.holders) {
            let Some(live) = &mut self.live else {
                self.reply(&reply, Err(Error::Lost(LostReason::SessionEnded)));
                continue;
            };
            if Instant::now() < expires {
                let start = live.life.clock.now();
                let outcome = live.session.holder(key.as_i64());
                match &outcome {
                    Ok(_) => self.answered(start),
                    Err(error) => drop(self.survived(error)),
                }
                self.reply(&reply, outcome);
            }
        }
    }

    pub(crate) fn serve_heartbeat(&mut self) {
        if self.heartbeat_is_due() {
            if let Err(error) = self.beat() {
                // An answer that says nothing about the leases: asked again until the deadline.
                self.setup.events.send(Event::TryFailed { error });
            }
        }
    }

    /// Proves every lease, in one statement. An error of a session that is still good proves
    /// nothing; anything that contradicts what we believe ends the session.
    fn beat(&mut self) -> Result<(), Error> {
        let Some(live) = &mut self.live else {
            return Err(Error::Lost(LostReason::SessionEnded));
        };
        let keys = live.life.keys();
        let start = live.life.clock.now();
        let left = live.life.deadline().since(start);
        live.session.end_by((!keys.is_empty()).then(|| Instant::now() + left));
        let facts = live.session.facts;
        let outcome = live.session.heartbeat(&keys);
        live.session.end_by(None);
        let verdict = match outcome {
            Ok(Pulse { pid, .. }) if pid != facts.pid => Err(LostReason::SessionSwapped),
            Ok(Pulse { standby: true, .. }) => Err(LostReason::Demoted),
            Ok(Pulse { timeline, .. }) if timeline != facts.timeline => Err(LostReason::Demoted),
            Ok(Pulse { missing, .. }) if !missing.is_empty() => Err(LostReason::NotOwner),
            Ok(_) => Ok(()),
            Err(error) => {
                let good = self.survived(&error);
                self.heartbeat_answered(good);
                return Err(error);
            }
        };
        self.heartbeat_answered(false);
        match verdict {
            Ok(()) => {
                self.answered(start);
                Ok(())
            }
            Err(reason) => {
                self.lose(reason, None);
                Err(match reason {
                    LostReason::SessionSwapped => Error::TransactionPooling,
                    LostReason::Demoted => Error::NotPrimary,
                    reason => Error::Lost(reason),
                })
            }
        }
    }

    /// At the end: gives back what guards still hold.
    pub(crate) fn release_everything(&mut self) {
        self.serve_releases();
        let Some(live) = &self.live else { return };
        let releases: Vec<Release> = live
            .life
            .leases()
            .into_iter()
            .filter(|core| core.begin_release())
            .map(|core| Release { core, reply: None })
            .collect();
        if !releases.is_empty() {
            self.unlock(releases);
        }
    }
}
