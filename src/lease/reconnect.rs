//! Opening the session, and giving it up.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, LostReason};
use crate::event::Event;
use crate::lease::fence::Fenced;
use crate::lease::life::Life;
use crate::lease::mailbox::Answer;
use crate::lease::owner::{Live, Owner};
use crate::session::Session;
use crate::session::connect::Findings;

impl Owner {
    /// Opens a session if there is none and its time has come. Whoever asked now hears of a
    /// failure; standing wishes go on.
    pub(crate) fn ensure_session(&mut self, asked: bool) -> bool {
        if self.live.is_some() {
            return true;
        }
        let early = self.connect_at.is_some_and(|at| Instant::now() < at);
        if early && !asked {
            return false;
        }
        let started = Instant::now();
        let start = self.setup.clock.now();
        match self.setup.connector.open() {
            Ok((session, findings)) => {
                self.backoff.reset();
                self.connect_at = None;
                self.retry_at = Instant::now();
                let facts = session.facts;
                let events = self.setup.events.clone();
                events.send(Event::SessionOpened {
                    pid: facts.pid,
                    server_version: facts.version,
                    took: started.elapsed(),
                });
                self.tell_findings(&session, findings);
                let clock = self.setup.clock.clone();
                let pace = self.setup.options.pace();
                let life = Arc::new(Life::new(facts, clock, pace, start, events));
                let idle = self.setup.options.idle_limits(facts.version);
                self.live = Some(Live { session, life, idle });
                true
            }
            Err(error) => {
                self.connecting_failed(&error);
                false
            }
        }
    }

    fn tell_findings(&self, session: &Session, findings: Findings) {
        let events = &self.setup.events;
        for setting in findings.missing {
            let effect = match setting {
                "idle_session_timeout" => {
                    "a stopped holder keeps its leases, a vanished one until TCP keepalives end it"
                }
                "transaction_timeout" => continue,
                _ => "the server may keep a vanished holder for longer",
            };
            events.send(Event::BoundMissing { setting, effect });
        }
        for (setting, configured, ours) in findings.replaced {
            events.send(Event::LimitReplaced { setting, configured, ours });
        }
        if !session.notify_works {
            events.send(Event::NotifyUnavailable { pid: session.facts.pid });
        }
    }

    fn connecting_failed(&mut self, error: &Error) {
        let retry_in = self.backoff.next();
        self.connect_at = Some(Instant::now() + retry_in);
        self.setup.events.send(Event::ConnectFailed { error: error.clone(), retry_in });
        if !error.is_retryable() {
            self.fail_wishes(error);
        }
        for waiting in self.waiting.values() {
            waiting.acquire.trouble(error);
        }
        for acquire in std::mem::take(&mut self.inbox.tries) {
            self.answer(&acquire, Answer::Failed(error.clone()));
        }
        for (reply, _) in std::mem::take(&mut self.inbox.pings) {
            self.reply(&reply, Err(error.clone()));
        }
        for (_, reply, _) in std::mem::take(&mut self.inbox.holders) {
            self.reply(&reply, Err(error.clone()));
        }
        for (_, reply) in std::mem::take(&mut self.inbox.step_downs) {
            self.reply(&reply, Err(error.clone()));
        }
    }

    /// Gives up the session: every lease on it is lost, and a new one is opened when needed.
    pub(crate) fn lose(&mut self, reason: LostReason, error: Option<Error>) {
        let Some(live) = self.live.take() else { return };
        live.life.end(reason, error);
        live.session.abandon();
        // Terms that had not begun are wishes again.
        for Fenced { acquire, .. } in std::mem::take(&mut self.fenced) {
            self.not_begun(acquire, reason);
        }
    }
}
