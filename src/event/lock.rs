//! What happens to locks of module `lock`.

use std::fmt;
use std::time::Duration;

use crate::error::Error;

/// A transition of a lock; part of [`Event::Lock`](crate::Event::Lock).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LockEvent {
    /// The lock was granted.
    Acquired {
        /// Backend process id of its session.
        pid: i32,
        /// Whether it is shared.
        shared: bool,
        /// Its time to live; `None` for a scoped lock.
        ttl: Option<Duration>,
    },
    /// It is held elsewhere, or all connections of the pool were in use for too long.
    Contended,
    /// Its time to live starts anew.
    Refreshed {
        /// Backend process id of its session.
        pid: i32,
        /// Its time to live.
        ttl: Duration,
    },
    /// It was released in good order.
    Released {
        /// Backend process id of its session.
        pid: i32,
    },
    /// It was lost: its session ended, or the time to live passed before it was released.
    Lost {
        /// Backend process id of its session.
        pid: i32,
        /// What the driver or the server said, where it said something.
        error: Option<Error>,
    },
    /// The server did not confirm an unlock: the session is ended, which releases the lock.
    ReleaseFailed {
        /// Backend process id of its session.
        pid: i32,
        /// Why.
        error: Error,
    },
    /// Asking for it failed.
    Failed {
        /// Why.
        error: Error,
    },
}

impl LockEvent {
    pub(crate) fn level(&self) -> log::Level {
        match self {
            LockEvent::Lost { .. } | LockEvent::ReleaseFailed { .. } => log::Level::Error,
            LockEvent::Failed { .. } => log::Level::Warn,
            _ => log::Level::Debug,
        }
    }
}

impl fmt::Display for LockEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockEvent::Acquired { pid, shared, ttl } => {
                write!(f, "acquired pid={pid} shared={shared}")?;
                ttl.map_or(Ok(()), |ttl| write!(f, " ttl={ttl:?}"))
            }
            LockEvent::Contended => f.write_str("contended"),
            LockEvent::Refreshed { pid, ttl } => write!(f, "refreshed pid={pid} ttl={ttl:?}"),
            LockEvent::Released { pid } => write!(f, "released pid={pid}"),
            LockEvent::Lost { pid, error } => {
                write!(f, "lost pid={pid}")?;
                error.as_ref().map_or(Ok(()), |error| write!(f, ": {}", error.chain()))
            }
            LockEvent::ReleaseFailed { pid, error } => {
                write!(f, "release not confirmed pid={pid}: {}", error.chain())
            }
            LockEvent::Failed { error } => write!(f, "failed: {}", error.chain()),
        }
    }
}
