//! Questions to the server that take no lock: heartbeats, and who holds what.

use std::time::{Duration, Instant};

use crate::error::{Error, LostReason};
use crate::event::Event;
use crate::key::Key;
use crate::lease::mailbox::Reply;
use crate::lease::owner::Owner;
use crate::session::Pulse;

/// How long a holder may take to answer that it was asked to step down.
const STEP_DOWN_BOUND: Duration = Duration::from_secs(2);

/// A request to step down whose answer is awaited.
pub(crate) struct AwaitedAnswer {
    pub(crate) nonce: String,
    pub(crate) reply: Reply<bool>,
    pub(crate) expires: Instant,
}

impl Owner {
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
    pub(crate) fn beat(&mut self) -> Result<(), Error> {
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

    /// Asks the holders of leases to step down, answers such requests, and gives up on answers that
    /// do not come.
    pub(crate) fn serve_step_downs(&mut self) {
        for nonce in std::mem::take(&mut self.inbox.heard_step_downs) {
            self.notify(&format!("a{nonce}"));
        }
        for (key, reply) in std::mem::take(&mut self.inbox.step_downs) {
            let outcome = self.ask_to_step_down(key);
            match outcome {
                Ok(Some(nonce)) => {
                    let bound = STEP_DOWN_BOUND.min(self.setup.options.query_timeout);
                    let expires = Instant::now() + bound;
                    self.awaited.push(AwaitedAnswer { nonce, reply, expires });
                }
                Ok(None) => self.reply(&reply, Ok(false)),
                Err(error) => self.reply(&reply, Err(error)),
            }
        }
        let now = Instant::now();
        let (expired, awaited) =
            std::mem::take(&mut self.awaited).into_iter().partition(|each| each.expires <= now);
        self.awaited = awaited;
        for AwaitedAnswer { reply, .. } in expired {
            self.reply(&reply, Ok(false));
        }
    }

    /// Sends the request; `None` if nobody can have heard it.
    pub(crate) fn ask_to_step_down(&mut self, key: Key) -> Result<Option<String>, Error> {
        let Some(live) = &mut self.live else {
            return Err(Error::Lost(LostReason::SessionEnded));
        };
        let start = live.life.clock.now();
        let holder = live.session.holder(key.as_i64());
        let hears = live.session.notify_works;
        match holder {
            Ok(holder) => {
                self.answered(start);
                if holder.is_none() || !hears {
                    return Ok(None);
                }
            }
            Err(error) => {
                self.survived(&error);
                return Err(error);
            }
        }
        let nonce = format!("{:016x}", fastrand::u64(..));
        self.notify(&format!("s{key} {nonce}"));
        Ok(Some(nonce))
    }

    pub(crate) fn notify(&mut self, message: &str) {
        let Some(live) = &mut self.live else { return };
        let start = live.life.clock.now();
        match live.session.notify(message) {
            Ok(()) => self.answered(start),
            Err(error) => {
                self.survived(&error);
                self.setup.events.send(Event::TryFailed { error });
            }
        }
    }
}
