//! How callers reach the owner thread, wherever it waits.
//!
//! # Protocol
//!
//! The owner waits either for a request (no session, or one over a Unix socket) or, parked in the
//! driver, for the server. Before it parks it publishes its session's guard, and then looks at the
//! queue once more. A caller queues its request first, and then wakes the published guard if there
//! is one. So either the owner finds the request at its last look, or the caller finds the guard:
//! both go through the mutex of [`Parked`], in opposite order.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::cancel::CancellationToken;
use crate::error::Error;
use crate::key::Key;
use crate::lease::lease::{Core, Held};
use crate::session::HolderRow;
use crate::session::transport::Guard;

/// What a caller that wants a lease hears.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The lease, which is released again if nobody takes it.
    Granted(Held),
    /// Held elsewhere. A standing request stays, and hears this once.
    Refused,
    /// It cannot be had: the last word.
    Failed(Error),
}

/// A wish for a lease.
#[derive(Debug)]
pub(crate) struct Acquire {
    /// Tells this wish from earlier ones for the same name.
    pub(crate) id: u64,
    pub(crate) name: Arc<str>,
    pub(crate) key: Key,
    /// Tried until granted or withdrawn, rather than once.
    pub(crate) standing: bool,
    /// The lease's token becomes a child of it.
    pub(crate) cancel: CancellationToken,
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) answer: Sender<Answer>,
    /// Why a standing wish was not even refused, last time.
    pub(crate) trouble: Arc<Mutex<Option<Error>>>,
}

impl Acquire {
    /// Notes why the wish was not even refused.
    pub(crate) fn trouble(&self, error: &Error) {
        let mut trouble = self.trouble.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *trouble = Some(error.clone());
    }
}

/// A request that is answered by asking the server.
pub(crate) type Reply<T> = Sender<Result<T, Error>>;

/// What callers ask of the owner thread.
#[derive(Debug)]
pub(crate) enum Request {
    Acquire(Acquire),
    Withdraw {
        key: Key,
        id: u64,
    },
    Release {
        core: Arc<Core>,
        reply: Option<Reply<()>>,
    },
    Ping {
        reply: Reply<()>,
        expires: Instant,
    },
    Holder {
        key: Key,
        reply: Reply<Option<HolderRow>>,
        expires: Instant,
    },
    StepDown {
        key: Key,
        reply: Reply<bool>,
    },
    /// These leases may be free now.
    Free(Vec<i64>),
    /// Grant nothing any more; heartbeats go on.
    StopGranting,
    /// Release what is held, end the session and the thread.
    ShutDown,
}

/// The guard of the session in which the owner is parked.
pub(crate) type Parked = Mutex<Option<Arc<Guard>>>;

pub(crate) fn parked(slot: &Parked) -> std::sync::MutexGuard<'_, Option<Arc<Guard>>> {
    slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The callers' end. When the last clone is dropped the owner ends.
#[derive(Debug)]
pub(crate) struct Mailbox {
    /// `None` only while being dropped.
    requests: Option<Sender<Request>>,
    parked: Arc<Parked>,
    process: u32,
}

impl Mailbox {
    pub(crate) fn new() -> (Mailbox, Receiver<Request>, Arc<Parked>) {
        let (requests, incoming) = unbounded();
        let parked = Arc::new(Parked::default());
        let process = std::process::id();
        (
            Mailbox { requests: Some(requests), parked: Arc::clone(&parked), process },
            incoming,
            parked,
        )
    }

    /// Queues a request and wakes the owner. Never blocks for longer than the owner takes to look
    /// at its queue. If the owner is gone the request is dropped, and with it its reply channel.
    pub(crate) fn post(&self, request: Request) {
        if self.requests.as_ref().is_some_and(|requests| requests.send(request).is_ok()) {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Some(guard) = parked(&self.parked).as_ref() {
            guard.wake();
        }
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        let requests = self.requests.take();
        if std::process::id() != self.process {
            // In a forked child the owner thread does not exist, and the channel and the mutex may
            // have been in use at the fork.
            std::mem::forget(requests);
            return;
        }
        drop(requests);
        self.wake();
    }
}
