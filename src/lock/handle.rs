//! A lock that is held: one pooled session, and how long it may be held for.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::clock::Tick;
use crate::error::Error;
use crate::event::LockEvent;
use crate::lock::config::check_ttl;
use crate::lock::core::{Core, Named};
use crate::lock::pooled::Registry;
use crate::session::pinned::Pinned;
use crate::token::FencingToken;

/// The part of a lock that its [`Lock`], its locker and threads at work on it share.
pub(crate) struct Held {
    pub(crate) core: Arc<Core>,
    pub(crate) registry: Weak<Registry>,
    pub(crate) id: u64,
    pub(crate) named: Named,
    pub(crate) shared: bool,
    pub(crate) pid: i32,
    /// The session's own idle limit, given back with it; `None` if it was left alone.
    pub(crate) former_idle: Option<String>,
    ttl: AtomicU64,
    /// When the time to live passes, in ticks; 0 once the lock has ended.
    deadline: AtomicU64,
    /// Set once: by the release, the drop, the loss or the close, whichever is first.
    ended: AtomicBool,
    session: Mutex<Option<Pinned>>,
    token: Mutex<Option<FencingToken>>,
}

/// What a lock was granted with.
pub(crate) struct Grant {
    pub(crate) named: Named,
    pub(crate) shared: bool,
    pub(crate) pid: i32,
    pub(crate) former_idle: Option<String>,
    pub(crate) ttl: Duration,
    /// When the statement that took it was sent.
    pub(crate) start: Tick,
    pub(crate) session: Pinned,
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// The time to live as the server's idle limit: whole milliseconds, never less.
pub(crate) fn idle_limit(core: &Core, ttl: Duration) -> Option<String> {
    core.config.enforce_ttl.then(|| ttl.as_micros().div_ceil(1000).max(1).to_string())
}

impl Held {
    pub(crate) fn new(core: &Arc<Core>, registry: Weak<Registry>, id: u64, grant: Grant) -> Held {
        let enforced = core.config.enforce_ttl;
        Held {
            core: Arc::clone(core),
            registry,
            id,
            named: grant.named,
            shared: grant.shared,
            pid: grant.pid,
            former_idle: grant.former_idle.filter(|_| enforced),
            ttl: AtomicU64::new(nanos(grant.ttl)),
            deadline: AtomicU64::new(grant.start.after(grant.ttl).as_nanos()),
            ended: AtomicBool::new(false),
            session: Mutex::new(Some(grant.session)),
            token: Mutex::new(None),
        }
    }

    fn session(&self) -> MutexGuard<'_, Option<Pinned>> {
        self.session.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn remaining(&self) -> Duration {
        let deadline = Tick::from_nanos(self.deadline.load(Ordering::Acquire));
        deadline.since(self.core.clock.now())
    }

    /// Ends the lock for everyone. True for the first who does.
    fn end(&self) -> bool {
        let first = !self.ended.swap(true, Ordering::AcqRel);
        self.deadline.store(0, Ordering::Release);
        if first {
            if let Some(registry) = self.registry.upgrade() {
                registry.forget(self.id);
            }
        }
        first
    }

    /// Ends a lock whose session is not to be used any more.
    fn lose(&self, session: &mut Option<Pinned>, error: Option<Error>) {
        drop(session.take());
        if self.end() {
            self.core.tell(&self.named, LockEvent::Lost { pid: self.pid, error });
        }
    }

    /// Runs a statement on the session of a lock that is held. On an error with which the session
    /// ended the lock is lost: [`Error::NotHeld`]. Other errors leave all as it was.
    fn ask<R>(&self, work: impl FnOnce(&mut Pinned) -> Result<R, Error>) -> Result<R, Error> {
        let mut slot = self.session();
        let Some(session) = slot.as_mut() else { return Err(Error::NotHeld) };
        let result = work(session);
        // Its caller had given up before the answer came.
        if self.ended.load(Ordering::Acquire) {
            drop(slot.take());
            return Err(Error::NotHeld);
        }
        match result {
            Ok(answer) => Ok(answer),
            Err(Error::TransactionPooling) => {
                self.lose(&mut slot, Some(Error::TransactionPooling));
                Err(Error::TransactionPooling)
            }
            Err(error) if session.is_gone(&error) => {
                self.core.config.breaker.failed();
                self.lose(&mut slot, Some(error));
                Err(Error::NotHeld)
            }
            Err(error) => Err(error),
        }
    }

    fn refresh(&self, ttl: Duration) -> Result<(), Error> {
        let start = self.core.clock.now();
        let idle = idle_limit(&self.core, ttl).filter(|_| self.former_idle.is_some());
        let key = (self.named.key.as_i64(), self.pid);
        let owned = self.ask(|session| session.refresh(key, self.shared, idle.as_deref()))?;
        if !owned {
            self.core.config.breaker.succeeded();
            self.lose(&mut self.session(), None);
            return Err(Error::NotHeld);
        }
        self.ttl.store(nanos(ttl), Ordering::Release);
        self.deadline.store(start.after(ttl).as_nanos(), Ordering::Release);
        if self.ended.load(Ordering::Acquire) {
            self.deadline.store(0, Ordering::Release);
            return Err(Error::NotHeld);
        }
        self.core.config.breaker.succeeded();
        self.core.tell(&self.named, LockEvent::Refreshed { pid: self.pid, ttl });
        Ok(())
    }

    /// Unlocks, by `end_by` if given. The session goes back only if the server confirmed it.
    pub(crate) fn unlock(&self, end_by: Option<Instant>) -> Result<(), Error> {
        let mut slot = self.session();
        let lapsed = self.remaining().is_zero();
        let Some(mut session) = slot.take() else { return Err(Error::NotHeld) };
        drop(slot);
        session.end_by(end_by);
        let key = (self.named.key.as_i64(), self.pid);
        let result = session.unlock(key, self.shared, self.former_idle.as_deref());
        session.end_by(None);
        let gone = result.as_ref().is_err_and(|error| session.is_gone(error));
        let pid = self.pid;
        let outcome = match result {
            Ok(true) => {
                session.give_back();
                if lapsed { Err(Error::NotHeld) } else { Ok(()) }
            }
            Ok(false) => Err(Error::NotHeld),
            Err(error @ Error::Timeout(_)) => Err(error),
            Err(_) if gone => Err(Error::NotHeld),
            Err(error) => Err(error),
        };
        let first = self.end();
        let event = match &outcome {
            Ok(()) => LockEvent::Released { pid },
            Err(Error::NotHeld) => LockEvent::Lost { pid, error: None },
            Err(error) => LockEvent::ReleaseFailed { pid, error: error.clone() },
        };
        if first || outcome.is_err() {
            self.core.tell(&self.named, event);
        }
        let breaker = &self.core.config.breaker;
        match &outcome {
            Ok(()) => breaker.succeeded(),
            Err(Error::NotHeld) if !gone => breaker.succeeded(),
            Err(_) => breaker.failed(),
        }
        outcome
    }
}

/// A lock that was acquired from a [`PooledLocker`](crate::lock::PooledLocker).
///
/// It is held until it is released, dropped, or its time to live has passed since the start of the
/// last successful [`refresh`](Lock::refresh), or its session ended. Dropping it releases it on a
/// thread of the library, without blocking; [`release`](Lock::release) says whether it worked.
///
/// All methods may be called from several threads at once, and inside an async runtime. Those that
/// ask the server do so one after the other: a call waits for the one before it, which has its bound.
#[must_use = "dropped at once, it releases the lock at once"]
pub struct Lock {
    pub(crate) held: Arc<Held>,
}

impl Lock {
    /// The key, as it was given to `acquire`.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.held.named.name
    }

    /// The time to live, as it was set last.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        Duration::from_nanos(self.held.ttl.load(Ordering::Acquire))
    }

    /// True once the time to live has passed, or the lock was released or found lost. No I/O.
    #[must_use]
    pub fn expired(&self) -> bool {
        self.remaining().is_zero()
    }

    /// How long the lock may be held without a refresh; zero once [`expired`](Lock::expired).
    /// Counted from before the last successful statement was sent, on a clock that goes on while
    /// the machine is suspended: the server's own clock for it ends later. No I/O.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.held.remaining()
    }

    /// True if other holders may have the lock at the same time, in shared mode.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.held.shared
    }

    /// The fencing token of this lock: greater than that of every earlier holder of the key who
    /// took one, also across a crash of the server.
    ///
    /// # Design
    ///
    /// A token that survives a crash costs a flush of the server's log, so it is taken at the
    /// first call, under the lock that is held, and remembered; locks without tokens are free of
    /// it. Among holders in shared mode it tells nothing about who is later.
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if the lock has expired or its session has ended; [`Error::Forked`] in a
    /// forked child; the error of the statement otherwise. The circuit breaker is not asked. The first
    /// call blocks for at most the query time-out, later ones not at all.
    pub fn token(&self) -> Result<FencingToken, Error> {
        let held = Arc::clone(&self.held);
        let known = *held.token.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(token) = known {
            return Ok(token);
        }
        self.alive()?;
        self.on_session(move || {
            let token = held.ask(|session| session.token(held.pid))?;
            let mut known = held.token.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            Ok(*known.get_or_insert(token))
        })
    }

    /// Proves that the session lives and holds the lock, and starts the time to live anew with
    /// `ttl`, counted from before the question.
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if the lock has expired, was released, or turns out to be lost; the TTL
    /// stays, and the session is not used again. [`Error::InvalidTtl`] for a `ttl` of zero or
    /// beyond 2^31 - 1 ms, [`Error::CircuitOpen`], and [`Error::Forked`] in a forked child: nothing
    /// changes. A statement that the server answered with an error leaves the lock as it is: ask
    /// again. Blocks for at most the query time-out.
    pub fn refresh(&self, ttl: Duration) -> Result<(), Error> {
        check_ttl(ttl)?;
        self.alive()?;
        if !self.held.core.config.breaker.can_proceed() {
            return Err(Error::CircuitOpen);
        }
        let held = Arc::clone(&self.held);
        let result = self.on_session(move || held.refresh(ttl));
        if !matches!(result, Ok(()) | Err(Error::NotHeld)) {
            self.held.core.config.breaker.failed();
        }
        result
    }

    /// Releases the lock, and gives its session back to the pool.
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if the lock was released before, or has expired, in which case it is
    /// unlocked all the same, or if its session has ended. [`Error::CircuitOpen`] leaves it held, as
    /// does [`Error::Forked`] in a forked child.
    /// Any other error means that the server did not confirm it: the session is ended, which
    /// releases the lock. Blocks for at most the query time-out.
    pub fn release(&self) -> Result<(), Error> {
        let core = &self.held.core;
        if core.is_forked() {
            return Err(Error::Forked);
        }
        if self.held.ended.load(Ordering::Acquire) {
            return Err(Error::NotHeld);
        }
        if !core.config.breaker.can_proceed() {
            return Err(Error::CircuitOpen);
        }
        let held = Arc::clone(&self.held);
        self.on_session(move || held.unlock(None))
    }

    fn alive(&self) -> Result<(), Error> {
        if self.held.core.is_forked() {
            return Err(Error::Forked);
        }
        if self.expired() { Err(Error::NotHeld) } else { Ok(()) }
    }

    /// A thread that does not come back in time has the session: the lock is given up.
    fn on_session<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<R, Error> + Send + 'static,
    ) -> Result<R, Error> {
        let core = &self.held.core;
        match core.run(Some(core.statement_bound()), None, job) {
            Ok(result) => result,
            Err(error) => {
                if self.held.end() {
                    let lost = LockEvent::Lost { pid: self.held.pid, error: Some(error.clone()) };
                    core.tell(&self.held.named, lost);
                }
                Err(error)
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let held = Arc::clone(&self.held);
        let core = Arc::clone(&held.core);
        if core.is_forked() {
            // The session is the parent's: not even a farewell may be sent on it.
            std::mem::forget(held);
        } else if held.session.try_lock().map_or(true, |session| session.is_some()) {
            core.later(move || {
                // Errors are told as events.
                held.unlock(None).unwrap_or_default();
            });
        }
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("key", &self.key())
            .field("ttl", &self.ttl())
            .field("remaining", &self.remaining())
            .field("shared", &self.held.shared)
            .field("pid", &self.held.pid)
            .finish_non_exhaustive()
    }
}
