//! What lockers of this module share: where sessions come from, and on which thread they are used.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crossbeam_channel::Receiver;

use crate::clock::Clock;
use crate::error::Error;
use crate::event::{Event, Events, LockEvent};
use crate::key::Key;
use crate::lock::config::LockConfig;
use crate::lock::worker::{Workers, inside_runtime};
use crate::session::pinned::Pinned;
use crate::session::pool::{Got, Source};

/// How long an endpoint that cannot be connected to is tried when the wait has no limit.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between the bound of a statement and that of the thread that waits for its thread.
const SLACK: Duration = Duration::from_millis(500);

/// The name and key of a lock, for events.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) name: Arc<str>,
    pub(crate) key: Key,
}

pub(crate) struct Core {
    pub(crate) config: LockConfig,
    pub(crate) clock: Clock,
    pub(crate) workers: Workers,
    events: Option<Events>,
    /// `None` once closed.
    source: Mutex<Option<Arc<dyn Source>>>,
    guarded: bool,
    /// Whether the endpoint of a user's pool was proved to keep sessions apart.
    proven: AtomicBool,
    /// The server's version, once it is known.
    version: AtomicI32,
    /// Cleared when the server turns out to be unable to look for vanished clients.
    pub(crate) check_connection: AtomicBool,
    /// The process that made this: a forked child must not touch its parent's sessions.
    process: u32,
}

impl Core {
    pub(crate) fn new(config: LockConfig, source: Arc<dyn Source>) -> Result<Arc<Core>, Error> {
        config.validate()?;
        let events = match &config.on_event {
            Some(listener) => Some(Events::start(Some(Arc::clone(listener)))?.0),
            None => None,
        };
        Ok(Arc::new(Core {
            config,
            clock: Clock::System,
            workers: Workers::default(),
            events,
            guarded: source.is_guarded(),
            proven: AtomicBool::new(source.is_guarded()),
            source: Mutex::new(Some(source)),
            version: AtomicI32::new(0),
            check_connection: AtomicBool::new(true),
            process: std::process::id(),
        }))
    }

    pub(crate) fn named(&self, name: &str) -> Named {
        Named { name: name.into(), key: Key::new(self.config.namespace, name) }
    }

    /// Without a listener an event is logged on the spot: there is no heartbeat that a slow logger
    /// could delay.
    pub(crate) fn tell(&self, named: &Named, what: LockEvent) {
        if self.events.is_none() && what.level() > log::max_level() {
            return;
        }
        let event = Event::Lock { name: Arc::clone(&named.name), key: named.key, what };
        match &self.events {
            Some(events) => events.send(event),
            None => log::log!(target: "leasehold", event.level(), "{event}"),
        }
    }

    pub(crate) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    fn source(&self) -> MutexGuard<'_, Option<Arc<dyn Source>>> {
        self.source.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Refuses when closed, forked, or when the breaker is open.
    pub(crate) fn admit(&self) -> Result<(), Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        if self.source().is_none() {
            return Err(Error::Closed);
        }
        if self.config.breaker.can_proceed() { Ok(()) } else { Err(Error::CircuitOpen) }
    }

    /// Tells the breaker of an outcome, as its documentation says.
    pub(crate) fn report<T>(&self, outcome: &Result<T, Error>) {
        match outcome {
            Ok(_) | Err(Error::NotAcquired) => self.config.breaker.succeeded(),
            Err(
                Error::EmptyName
                | Error::InvalidTtl
                | Error::Closed
                | Error::Cancelled
                | Error::CircuitOpen
                | Error::Forked,
            ) => {}
            Err(_) => self.config.breaker.failed(),
        }
    }

    /// How long to wait for a session when `left` is left; `None` waits for ever.
    pub(crate) fn conn_wait(&self, left: Option<Duration>) -> Option<Duration> {
        match (self.config.conn_wait_timeout, left) {
            (Some(wait), Some(left)) => Some(wait.min(left)),
            (wait, left) => wait.or(left),
        }
    }

    /// A session out of the pool; `None` if all were in use for too long. Blocks for at most
    /// `wait`, and for twice that the first time that a user's pool is used.
    pub(crate) fn checkout(
        &self,
        wait: Option<Duration>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Pinned>, Error> {
        let source = self.source().clone().ok_or(Error::Closed)?;
        let Some(mut session) = self.get(&*source, wait, stop)? else { return Ok(None) };
        if self.proven.load(Ordering::Acquire) {
            return Ok(Some(session));
        }
        if source.size() > 1 {
            let Some(mut other) = self.get(&*source, wait, stop)? else {
                session.give_back();
                return Ok(None);
            };
            session.prove_apart(&mut other)?;
            other.give_back();
        }
        self.proven.store(true, Ordering::Release);
        Ok(Some(session))
    }

    /// A session out of the pool, whatever it is worth.
    pub(crate) fn checkout_unproved(
        &self,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Pinned>, Error> {
        let source = self.source().clone().ok_or(Error::Closed)?;
        self.get(&*source, self.config.conn_wait_timeout, stop)
    }

    fn get(
        &self,
        source: &dyn Source,
        wait: Option<Duration>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Pinned>, Error> {
        match source.get(wait, wait.unwrap_or(PATIENCE), stop) {
            Got::Session(session) => Ok(Some(session)),
            Got::Busy => Ok(None),
            Got::Failed(error) => Err(error),
        }
    }

    /// The server's version: known, remembered, or asked for.
    pub(crate) fn version(&self, session: &mut Pinned) -> Result<i32, Error> {
        match self.version.load(Ordering::Relaxed) {
            0 => {
                let version = match session.known_version() {
                    Some(version) => version,
                    None => session.ping()?.1,
                };
                self.version.store(version, Ordering::Relaxed);
                Ok(version)
            }
            version => Ok(version),
        }
    }

    /// How long a call may take that checks out a session and runs `statements` on it.
    pub(crate) fn bound(&self, statements: u32) -> Option<Duration> {
        self.bound_with(self.config.conn_wait_timeout, statements)
    }

    /// [`Core::bound`] of a call that waits for a session for `wait`.
    pub(crate) fn bound_with(&self, wait: Option<Duration>, statements: u32) -> Option<Duration> {
        let wait = wait?.saturating_mul(2);
        Some(wait.saturating_add(self.statement_bound().saturating_mul(statements)))
    }

    pub(crate) fn statement_bound(&self) -> Duration {
        self.config.query_timeout.saturating_add(SLACK)
    }

    /// Runs what talks to the server: here, if its statements end by themselves and this thread is
    /// not inside a runtime, on which the driver panics; otherwise on a thread of ours, while this
    /// one waits for at most `bound`. The detour is two wake-ups of a thread; `benches/lock.rs`
    /// measures it.
    pub(crate) fn run<R: Send + 'static>(
        &self,
        bound: Option<Duration>,
        stop: Option<(&Receiver<()>, Duration)>,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, Error> {
        if self.guarded && !inside_runtime() {
            return Ok(job());
        }
        self.workers.call(bound, stop, job)
    }

    /// Runs `job` on a thread of ours, without waiting. If there is no thread to be had, what it
    /// owns is left alone, and the server frees it when the process ends.
    pub(crate) fn later(&self, job: impl FnOnce() + Send + 'static) {
        if let Err(error) = self.workers.spawn(job) {
            log::error!(target: "leasehold", "a session is left behind: {}", error.chain());
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.source().is_none()
    }

    /// Refuses from now on, and lets go of the pool. Does not block. In a forked child it does
    /// nothing: closing the pool would say farewell over the parent's sockets.
    pub(crate) fn close(&self) {
        if self.is_forked() {
            return;
        }
        if let Some(source) = self.source().take() {
            // The pool's last handle closes its idle sessions.
            self.later(move || drop(source));
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        match self.is_forked() {
            // Without the mutex: a thread that the child does not have may have held it.
            true => std::mem::forget(self.source.get_mut().map(Option::take)),
            false => self.close(),
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("config", &self.config).finish_non_exhaustive()
    }
}
