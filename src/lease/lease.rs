//! A lease, as a job or a caller sees it.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use crossbeam_channel::bounded;

use crate::cancel::{CancelReason, CancellationToken};
use crate::clock::Tick;
use crate::error::{Error, LostReason, Timeout};
use crate::event::{Event, Events};
use crate::key::Key;
use crate::lease::life::Life;
use crate::lease::mailbox::{Mailbox, Request};
use crate::lease::registry::Slot;
use crate::token::FencingToken;

/// Held until lost or released.
const HELD: u8 = 0;
/// The job has returned, and the unlock is on its way.
const RELEASING: u8 = 1;
/// Unlocked.
const ENDED: u8 = 2;
/// Lost while held.
const LOST: u8 = 3;

/// One term of one name. Leaves `HELD` once: to `LOST` by [`Core::lose`], or to `RELEASING` by
/// [`Core::begin_release`]; the compare-exchange decides which, so a term either counts as done or
/// as lost, never as both.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) name: Arc<str>,
    pub(crate) key: Key,
    pub(crate) token: FencingToken,
    pub(crate) life: Arc<Life>,
    pub(crate) cancellation: CancellationToken,
    state: AtomicU8,
    process: u32,
}

impl Core {
    pub(crate) fn new(
        name: Arc<str>,
        key: Key,
        token: FencingToken,
        life: Arc<Life>,
        cancellation: CancellationToken,
    ) -> Core {
        let state = AtomicU8::new(HELD);
        Core { name, key, token, life, cancellation, state, process: std::process::id() }
    }

    pub(crate) fn forked(&self) -> bool {
        std::process::id() != self.process
    }

    fn is_held(&self) -> bool {
        self.lost_or_left().is_none()
    }

    /// `None` while held. Ends the session's life if its deadline has passed: what was said once
    /// stays so.
    pub(crate) fn lost_or_left(&self) -> Option<Error> {
        if self.forked() {
            return Some(Error::Forked);
        }
        let passed = self.life.clock.now() >= self.life.deadline();
        if passed && self.state.load(Ordering::Acquire) == HELD {
            self.life.end_if_passed();
            // The deadline may have moved between the two looks at it.
            if self.life.clock.now() >= self.life.deadline() {
                return Some(Error::Lost(self.life.ended().unwrap_or(LostReason::NoAnswer)));
            }
        }
        match self.state.load(Ordering::Acquire) {
            HELD => None,
            LOST => Some(Error::Lost(self.life.ended().unwrap_or(LostReason::NoAnswer))),
            _ => Some(Error::NotHeld),
        }
    }

    /// Marks the lease lost and tells its job, unless it is being released.
    pub(crate) fn lose(&self, reason: LostReason, events: &Events) {
        let won = self.state.compare_exchange(HELD, LOST, Ordering::AcqRel, Ordering::Acquire);
        if won.is_ok() {
            events.send(Event::Lost {
                name: Arc::clone(&self.name),
                key: self.key,
                pid: self.life.pid(),
                token: self.token,
                reason,
            });
            self.cancellation.cancel_with(CancelReason::Lost(reason));
        }
    }

    /// From now on the lease is not held; true if it was until now.
    pub(crate) fn begin_release(&self) -> bool {
        self.is_held()
            && self
                .state
                .compare_exchange(HELD, RELEASING, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
    }

    /// The unlock was confirmed.
    pub(crate) fn ended(&self) {
        self.state.store(ENDED, Ordering::Release);
    }

    /// True if the lease was lost while held.
    pub(crate) fn was_lost(&self) -> bool {
        matches!(self.lost_or_left(), Some(Error::Lost(_) | Error::Forked))
    }
}

/// The right to a lease's release: released when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) core: Arc<Core>,
    mailbox: Arc<Mailbox>,
}

impl Held {
    pub(crate) fn new(core: Arc<Core>, mailbox: Arc<Mailbox>) -> Held {
        Held { core, mailbox }
    }

    /// Releases and waits for the server's confirmation, at most for `bound`. A lease that was
    /// lost is nothing to release: `Err(Lost)`.
    pub(crate) fn release(self, bound: Duration) -> Result<(), Error> {
        if !self.core.begin_release() {
            return Err(self.core.lost_or_left().unwrap_or(Error::NotHeld));
        }
        self.confirm(bound)
    }

    /// The second half of [`Held::release`], after [`Core::begin_release`].
    pub(crate) fn confirm(&self, bound: Duration) -> Result<(), Error> {
        let (reply, answer) = bounded(1);
        let core = Arc::clone(&self.core);
        self.mailbox.post(Request::Release { core, reply: Some(reply) });
        answer.recv_timeout(bound).unwrap_or(Err(Error::Timeout(Timeout::Session(bound))))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.core.forked() && self.core.begin_release() {
            let core = Arc::clone(&self.core);
            self.mailbox.post(Request::Release { core, reply: None });
        }
    }
}

/// A lease: the right to do one named job, for one term.
///
/// Given to the job by [`Locker::run`](crate::Locker::run) and
/// [`try_run`](crate::Locker::try_run). Nothing here does I/O or blocks, except
/// [`wait_timeout`](Lease::wait_timeout), and [`guard`](Lease::guard) on the caller's connection.
///
/// A job that goes on for long looks at [`is_held`](Lease::is_held) or
/// [`cancellation`](Lease::cancellation) between steps and returns soon after either says stop.
#[derive(Debug)]
pub struct Lease {
    pub(crate) core: Arc<Core>,
}

impl Lease {
    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// The advisory-lock key of the name.
    #[must_use]
    pub fn key(&self) -> Key {
        self.core.key
    }

    /// The term's fencing token: greater than that of every earlier term of this name.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.core.token
    }

    /// True while no other process can hold the lease, as far as this one can know.
    ///
    /// Turns false by the clock alone when the deadline passes, also if every other thread is
    /// stuck, and right after the machine or the process was suspended past it. Once false, it
    /// stays false. In a forked child it is false.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.core.is_held()
    }

    /// The time until the lease is lost if no further heartbeat succeeds; zero if it is not held.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if !self.is_held() {
            return Duration::ZERO;
        }
        match self.core.life.deadline() {
            Tick::ZERO => Duration::ZERO,
            deadline => deadline.since(self.core.life.clock.now()),
        }
    }

    /// `Ok` if the job should go on.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lease was lost, [`Error::NotHeld`] if it was released,
    /// [`Error::Cancelled`] if the job was told to stop for another reason (see
    /// [`CancellationToken::reason`]), [`Error::Forked`] in a forked child.
    pub fn check(&self) -> Result<(), Error> {
        match self.core.lost_or_left() {
            Some(error) => Err(error),
            None if self.core.cancellation.is_cancelled() => Err(Error::Cancelled),
            None => Ok(()),
        }
    }

    /// Set when the job should stop, with the reason: the caller's token was set, the `Locker` is
    /// closing, the lease was lost, or another process asked the holder to step down.
    #[must_use]
    pub fn cancellation(&self) -> &CancellationToken {
        &self.core.cancellation
    }

    /// Sleeps for `duration`, or until the job should stop: then true, at once. `duration` does not
    /// run while the machine is suspended; the lease's deadline does.
    #[must_use]
    pub fn wait_timeout(&self, duration: Duration) -> bool {
        self.core.cancellation.wait_timeout(duration)
    }
}

/// A lease held by the caller, from [`Locker::try_acquire`](crate::Locker::try_acquire) or
/// [`acquire_timeout`](crate::Locker::acquire_timeout), until it is released or dropped.
///
/// No thread is spent on it. Unlike with [`Locker::run`](crate::Locker::run), nobody waits for the
/// work under it: [`Locker::close`](crate::Locker::close) sets its token and releases it.
///
/// Dropping it releases the lease without waiting for the server. A lost lease is not released, but
/// its name is in use on the `Locker` until the guard is gone.
#[must_use = "dropped at once, it releases the lease at once"]
pub struct LeaseGuard {
    lease: Lease,
    // Fields drop in this order: the release is on its way before the name is free again, so the
    // next request for the name comes after it.
    held: Option<Held>,
    _slot: Slot,
    bound: Duration,
}

impl LeaseGuard {
    pub(crate) fn new(held: Held, slot: Slot, bound: Duration) -> LeaseGuard {
        let lease = Lease { core: Arc::clone(&held.core) };
        LeaseGuard { lease, held: Some(held), _slot: slot, bound }
    }

    /// Releases the lease and waits for the server's confirmation. Blocks for at most the query
    /// time-out; whatever happens, the lease is not held afterwards.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lease was lost before; [`Error::NotHeld`] if the `Locker` was closed
    /// before, or if the server said that the lock was not held; [`Error::Forked`] in a forked
    /// child; [`Error::Timeout`] if there is no word yet: the release is on its way; another error
    /// if the server did not confirm. Where it said no, or did not confirm, the session is closed,
    /// which releases the lock.
    pub fn release(mut self) -> Result<(), Error> {
        match self.held.take() {
            Some(held) => held.release(self.bound),
            None => Err(Error::NotHeld),
        }
    }
}

impl Deref for LeaseGuard {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.lease
    }
}

impl fmt::Debug for LeaseGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGuard").field("lease", &self.lease).finish_non_exhaustive()
    }
}
