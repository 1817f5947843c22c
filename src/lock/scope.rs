//! The transaction under a scoped lock: how it is opened, waited in, given up and ended.
//!
//! # Protocol of a cancelled wait
//!
//! The thread that waits is inside the driver. When the token is set, its listener, which must not
//! block, has a worker send cancel requests until the wait has ended, and after the query time-out
//! cut the connection. A cancel request that comes late would hit whatever the session does next,
//! so a session for which one was sent is ended, never used again.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use postgres::CancelToken;
use postgres::error::SqlState;

use crate::cancel::CancellationToken;
use crate::error::Error;
use crate::lock::core::Core;
use crate::session::lock_statements::ScopeBegin;
use crate::session::pinned::Pinned;
use crate::session::pool::Cancel;
use crate::session::transport::Guard;

/// How long a cancel request has before another is sent.
const CANCEL_AGAIN: Duration = Duration::from_millis(200);

/// How a scoped lock is asked for.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) key: i64,
    pub(crate) shared: bool,
    pub(crate) wait: bool,
}

/// A transaction that holds a lock. Dropping it ends its session, on a thread of the library.
pub(crate) struct Scope {
    core: Arc<Core>,
    session: Option<Pinned>,
    pub(crate) pid: i32,
}

impl Scope {
    /// Ends the transaction; the lock was held until then if it says so.
    pub(crate) fn end(mut self, commit: bool) -> Result<(), Error> {
        let Some(mut session) = self.session.take() else { return Err(Error::NotHeld) };
        let result = if commit { session.commit() } else { session.rollback() };
        match result {
            Ok(()) => {
                session.give_back();
                Ok(())
            }
            Err(error) => {
                let reason = session.loss(&error);
                log::debug!(target: "leasehold", "the end of a scoped lock: {}", error.chain());
                Err(Error::Lost(reason))
            }
        }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.core.later(move || drop(session));
        }
    }
}

/// The state of one wait.
#[derive(Default)]
struct Wait {
    state: Mutex<WaitState>,
    changed: Condvar,
}

#[derive(Default)]
struct WaitState {
    over: bool,
    /// A cancel request was sent, or is being sent.
    asked: bool,
}

impl Wait {
    fn lock(&self) -> MutexGuard<'_, WaitState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Ends the wait; true if a cancel request was sent for it.
    fn finish(&self) -> bool {
        let mut state = self.lock();
        state.over = true;
        self.changed.notify_all();
        state.asked
    }

    /// Sends cancel requests until the wait is over; see the head of this file.
    fn cancel(&self, token: &CancelToken, send: &Cancel, guard: Option<&Guard>, bound: Duration) {
        let end = Instant::now() + bound;
        let mut state = self.lock();
        while !state.over {
            state.asked = true;
            drop(state);
            if let Err(error) = send(token) {
                log::warn!(target: "leasehold", "cancel request failed: {error}");
            }
            let again = self.changed.wait_timeout_while(self.lock(), CANCEL_AGAIN, |s| !s.over);
            state = again.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            if !state.over && Instant::now() >= end {
                if let Some(guard) = guard {
                    guard.kill();
                }
                return;
            }
        }
    }
}

/// What one attempt came to.
enum Outcome {
    Granted(Scope),
    Contended,
    /// The server's limit for the wait has passed.
    TooLate,
    /// The server cannot look for vanished clients.
    NoConnectionCheck,
}

/// Takes a scoped lock: `None` if it is held elsewhere, or was for too long.
pub(crate) fn enter(
    core: &Arc<Core>,
    send: &Cancel,
    cancel: &CancellationToken,
    wish: Wish,
) -> Result<Option<Scope>, Error> {
    let end = core.config.max_wait.and_then(|wait| Instant::now().checked_add(wait));
    let mut session = None;
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok(None);
        }
        let pinned = match session.take() {
            Some(pinned) => pinned,
            None => match core.checkout_unproved(&|| cancel.is_cancelled() || core.is_closed())? {
                Some(pinned) => pinned,
                None if cancel.is_cancelled() => return Err(Error::Cancelled),
                None if core.is_closed() => return Err(Error::Closed),
                None => return Ok(None),
            },
        };
        match attempt(core, send, cancel, wish, left, pinned)? {
            (Outcome::Granted(scope), _) => return Ok(Some(scope)),
            (Outcome::Contended, pinned) => {
                if let Some(pinned) = pinned {
                    pinned.give_back();
                }
                return Ok(None);
            }
            (Outcome::NoConnectionCheck, pinned) => {
                core.check_connection.store(false, Ordering::Relaxed);
                session = pinned;
            }
            (Outcome::TooLate, pinned) => session = pinned,
        }
        if cancel.is_cancelled() {
            if let Some(pinned) = session {
                pinned.give_back();
            }
            return Err(Error::Cancelled);
        }
    }
}

/// Opens a transaction and asks for the lock once. A session that comes back is as it was before.
fn attempt(
    core: &Arc<Core>,
    send: &Cancel,
    cancel: &CancellationToken,
    wish: Wish,
    left: Option<Duration>,
    mut session: Pinned,
) -> Result<(Outcome, Option<Pinned>), Error> {
    let limit = match (core.config.wait_slice, left) {
        (Some(slice), Some(left)) => Some(slice.min(left)),
        (slice, left) => slice.or(left),
    };
    let limit = limit.filter(|_| wish.wait);
    let begin = ScopeBegin {
        key: wish.key,
        shared: wish.shared,
        wait: wish.wait,
        lock_timeout: limit.unwrap_or_default(),
        max_hold: core.config.max_hold.unwrap_or_default(),
        server_version: core.version(&mut session)?,
        check_connection: core.check_connection.load(Ordering::Relaxed),
    };
    let answer_by = match (wish.wait, limit) {
        (true, None) => None,
        (_, limit) => Some(limit.unwrap_or_default() + core.config.query_timeout),
    };
    let wait = Arc::new(Wait::default());
    let subscription = wish.wait.then(|| listen(core, send, cancel, &wait, &mut session)).flatten();
    let result = session.begin(&begin, answer_by);
    let asked = wait.finish();
    drop(subscription);
    if asked {
        // Whatever the answer was: the request may come late.
        return Err(Error::Cancelled);
    }
    let outcome = match result {
        Ok(taken) if taken.granted && !cancel.is_cancelled() => {
            let core = Arc::clone(core);
            let scope = Scope { core, session: Some(session), pid: taken.pid };
            return Ok((Outcome::Granted(scope), None));
        }
        Ok(_) => Outcome::Contended,
        Err(error) => match error.sqlstate() {
            Some(state) if *state == SqlState::LOCK_NOT_AVAILABLE => Outcome::TooLate,
            Some(state)
                if *state == SqlState::INVALID_PARAMETER_VALUE && begin.check_connection =>
            {
                Outcome::NoConnectionCheck
            }
            _ => return Err(error),
        },
    };
    session.rollback()?;
    if cancel.is_cancelled() {
        session.give_back();
        return Err(Error::Cancelled);
    }
    Ok((outcome, Some(session)))
}

/// Has a worker cancel the wait when the token is set.
fn listen(
    core: &Arc<Core>,
    send: &Cancel,
    cancel: &CancellationToken,
    wait: &Arc<Wait>,
    session: &mut Pinned,
) -> Option<crate::cancel::Subscription> {
    let token = session.cancel_token()?;
    let (guard, send) = (session.guard(), Arc::clone(send));
    let (core, wait) = (Arc::clone(core), Arc::clone(wait));
    Some(cancel.subscribe(move || {
        let bound = core.config.query_timeout;
        core.later(move || wait.cancel(&token, &send, guard.as_deref(), bound));
    }))
}
