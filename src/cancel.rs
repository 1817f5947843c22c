//! Cancellation that blocking code can wait for.
//!
//! # Protocol
//!
//! A token is a node: an atomic reason, and under a mutex the links to children and listeners.
//!
//! - *First reason wins.* `cancel` swaps the reason from 0 with a compare-exchange; whoever
//!   succeeds, and nobody else, goes on to take the mutex, takes the links out, notifies the
//!   condition variable and then, with the mutex released, cancels the children and calls the
//!   listeners.
//! - *No wake-up is lost.* A waiter reads the reason with the mutex held before each wait. The
//!   notification comes after the mutex was taken, so either the waiter sees the reason or it
//!   already waits.
//! - *No link is lost.* A link is added with the mutex held, after the reason was read as 0. The
//!   canceller takes the mutex after its swap, so it finds the link.
//! - Reading the reason is an `Acquire` load, the swap `AcqRel`: what was written before `cancel`
//!   is seen by those who see the reason.
//!
//! The models in this file's tests check these under loom.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::error::LostReason;

#[cfg(leasehold_loom)]
use loom::sync::{Condvar, Mutex, MutexGuard, atomic::AtomicU8, atomic::Ordering};
#[cfg(not(leasehold_loom))]
use std::sync::{Condvar, Mutex, MutexGuard, atomic::AtomicU8, atomic::Ordering};

/// Why a [`CancellationToken`] was set.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CancelReason {
    /// The program called [`CancellationToken::cancel`].
    Cancelled,
    /// The [`Locker`](crate::Locker) was closed.
    Closed,
    /// Another process asked the holder to step down.
    StepDown,
    /// The lease was lost.
    Lost(LostReason),
}

impl CancelReason {
    const LOST: u8 = 16;

    fn code(self) -> u8 {
        match self {
            CancelReason::Cancelled => 1,
            CancelReason::Closed => 2,
            CancelReason::StepDown => 3,
            CancelReason::Lost(lost) => {
                let at = LostReason::ALL.iter().position(|each| *each == lost);
                CancelReason::LOST + u8::try_from(at.unwrap_or(0)).unwrap_or(0)
            }
        }
    }

    fn from_code(code: u8) -> Option<CancelReason> {
        match code {
            0 => None,
            1 => Some(CancelReason::Cancelled),
            2 => Some(CancelReason::Closed),
            3 => Some(CancelReason::StepDown),
            lost => LostReason::ALL
                .get(usize::from(lost.saturating_sub(CancelReason::LOST)))
                .map(|lost| CancelReason::Lost(*lost)),
        }
    }
}

impl fmt::Display for CancelReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CancelReason::Cancelled => f.write_str("cancelled"),
            CancelReason::Closed => f.write_str("the locker was closed"),
            CancelReason::StepDown => f.write_str("asked to step down"),
            CancelReason::Lost(lost) => write!(f, "lease lost: {lost}"),
        }
    }
}

type Listener = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Links {
    children: Vec<Weak<Node>>,
    listeners: Vec<(u64, Listener)>,
    next_listener: u64,
    /// Children are swept when there are this many, so that dead ones do not pile up.
    sweep_at: usize,
}

struct Node {
    reason: AtomicU8,
    links: Mutex<Links>,
    set: Condvar,
}

impl Node {
    fn new(code: u8) -> Node {
        Node {
            reason: AtomicU8::new(code),
            links: Mutex::new(Links { sweep_at: 8, ..Links::default() }),
            set: Condvar::new(),
        }
    }

    fn code(&self) -> u8 {
        self.reason.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Links> {
        // The mutex protects lists that are whole between any two statements: a panic elsewhere
        // does not make them wrong.
        self.links.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn cancel(self: &Arc<Node>, code: u8) -> bool {
        let mut first = None;
        let mut nodes = vec![Arc::clone(self)];
        while let Some(node) = nodes.pop() {
            let won =
                node.reason.compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire).is_ok();
            first.get_or_insert(won);
            if !won {
                continue;
            }
            let links = {
                let mut links = node.lock();
                node.set.notify_all();
                std::mem::take(&mut *links)
            };
            nodes.extend(links.children.iter().filter_map(Weak::upgrade));
            for (_, listener) in links.listeners {
                listener();
            }
        }
        first == Some(true)
    }
}

/// Tells blocking code that it should stop, and why; the first reason wins and stays.
///
/// Clones are the same token. A [child](CancellationToken::child_token) is set with its parent, and
/// can be set alone. Nothing here needs a database, or blocks but the `wait` methods.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use leasehold::{CancelReason, CancellationToken};
///
/// let stop = CancellationToken::new();
/// let job = stop.child_token();
/// assert!(!job.wait_timeout(Duration::from_millis(1)));
/// stop.cancel();
/// assert!(job.wait_timeout(Duration::from_secs(3600)));
/// assert_eq!(job.reason(), Some(CancelReason::Cancelled));
/// ```
#[derive(Clone)]
pub struct CancellationToken {
    node: Arc<Node>,
}

impl CancellationToken {
    /// A token that is not set.
    #[must_use]
    pub fn new() -> CancellationToken {
        CancellationToken { node: Arc::new(Node::new(0)) }
    }

    /// Sets the token with [`CancelReason::Cancelled`], and every child of it; wakes all waiters.
    /// True if it was not set before.
    ///
    /// It takes a mutex for a moment, so it is for any thread, but not for the inside of a POSIX
    /// signal handler: set it from a thread that waits for signals.
    pub fn cancel(&self) -> bool {
        self.cancel_with(CancelReason::Cancelled)
    }

    /// Sets the token for `reason`. True if it was not set before; otherwise nothing changes.
    pub fn cancel_with(&self, reason: CancelReason) -> bool {
        self.node.cancel(reason.code())
    }

    /// True once the token was set.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.node.code() != 0
    }

    /// Why the token was set; `None` while it is not.
    #[must_use]
    pub fn reason(&self) -> Option<CancelReason> {
        CancelReason::from_code(self.node.code())
    }

    /// Blocks until the token is set, for ever if nobody does.
    pub fn wait(&self) {
        let mut links = self.node.lock();
        while self.node.code() == 0 {
            links = self.node.set.wait(links).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Blocks until the token is set, at most for `timeout`: an interruptible sleep. True if it is
    /// set. Time does not count while the machine is suspended.
    #[must_use]
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        match Instant::now().checked_add(timeout) {
            Some(deadline) => self.wait_deadline(deadline),
            None => {
                self.wait();
                true
            }
        }
    }

    /// Blocks until the token is set or `deadline` has passed. True if it is set.
    #[must_use]
    pub fn wait_deadline(&self, deadline: Instant) -> bool {
        let mut links = self.node.lock();
        loop {
            if self.node.code() != 0 {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            links = match self.node.set.wait_timeout(links, left) {
                Ok((links, _)) => links,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// A token that is set with this one, and can be set alone without touching this one.
    #[must_use]
    pub fn child_token(&self) -> CancellationToken {
        let mut links = self.node.lock();
        let code = self.node.code();
        let child = Arc::new(Node::new(code));
        if code == 0 {
            if links.children.len() >= links.sweep_at {
                links.children.retain(|child| child.strong_count() > 0);
                links.sweep_at = (links.children.len() * 2).max(8);
            }
            links.children.push(Arc::downgrade(&child));
        }
        CancellationToken { node: child }
    }

    /// A guard that sets this token when it is dropped, also by a panic.
    pub fn drop_guard(&self) -> DropGuard {
        DropGuard { token: Some(self.clone()) }
    }

    /// Calls `listener` once, when the token is set, on the thread that sets it; at once if it is
    /// set already; never if the subscription is dropped first.
    pub(crate) fn subscribe(&self, listener: impl FnOnce() + Send + 'static) -> Subscription {
        let mut links = self.node.lock();
        let id = links.next_listener;
        if self.node.code() != 0 {
            drop(links);
            listener();
        } else {
            links.next_listener += 1;
            links.listeners.push((id, Box::new(listener)));
        }
        Subscription { node: Arc::clone(&self.node), id }
    }
}

impl Default for CancellationToken {
    fn default() -> CancellationToken {
        CancellationToken::new()
    }
}

impl fmt::Debug for CancellationToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancellationToken").field("reason", &self.reason()).finish()
    }
}

/// Sets a [`CancellationToken`] when dropped; see [`CancellationToken::drop_guard`].
#[derive(Debug)]
#[must_use = "dropped at once, it sets its token at once"]
pub struct DropGuard {
    token: Option<CancellationToken>,
}

impl DropGuard {
    /// Gives the token back, unset.
    #[must_use]
    pub fn disarm(mut self) -> CancellationToken {
        self.token.take().unwrap_or_default()
    }
}

impl Drop for DropGuard {
    fn drop(&mut self) {
        if let Some(token) = &self.token {
            token.cancel();
        }
    }
}

/// Keeps a listener registered.
pub(crate) struct Subscription {
    node: Arc<Node>,
    id: u64,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.node.lock().listeners.retain(|(id, _)| *id != self.id);
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests;

#[cfg(test)]
#[cfg(leasehold_loom)]
mod models;
