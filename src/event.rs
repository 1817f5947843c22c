//! What happens to leases and their session, told to `log` and to
//! [`Options::on_event`](crate::Options::on_event), in order.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

use crate::cancel::CancelReason;
use crate::error::{Error, LostReason};
use crate::key::Key;
use crate::token::FencingToken;

/// A transition of a lease, of its session, or of the [`Locker`](crate::Locker).
///
/// `pid` is the process id of the session's backend on the server, as in `pg_stat_activity`.
/// `Display` is the line that goes to `log`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A session was opened and proved fit to hold locks.
    SessionOpened {
        /// Backend process id.
        pid: i32,
        /// `server_version_num`, as in 150018.
        server_version: i32,
        /// How long opening and proving took.
        took: Duration,
    },
    /// The server lacks a setting that bounds how long it keeps a vanished client.
    BoundMissing {
        /// The setting, as in `pg_settings`.
        setting: &'static str,
        /// What is not bounded by it.
        effect: &'static str,
    },
    /// A limit in the server's configuration would have ended our session, and was replaced for
    /// our session.
    LimitReplaced {
        /// The setting, as in `pg_settings`.
        setting: String,
        /// The configured value, in the setting's own unit.
        configured: String,
        /// Our session's value, in the same unit.
        ours: String,
    },
    /// Notifications do not arrive: standbys find out about a release by polling.
    NotifyUnavailable {
        /// Backend process id.
        pid: i32,
    },
    /// Connecting or proving the endpoint failed; it is tried again as long as there is demand.
    ConnectFailed {
        /// Why.
        error: Error,
        /// The wait before the next attempt.
        retry_in: Duration,
    },
    /// An answer is late: `used` of the time between the moment when the heartbeat was due (0) and
    /// the loss (1) has gone by.
    Late {
        /// Backend process id.
        pid: i32,
        /// From 0 to 1.
        used: f64,
    },
    /// The session ended; each lease on it is lost.
    SessionLost {
        /// Backend process id.
        pid: i32,
        /// Why.
        reason: LostReason,
        /// What the driver or the server said, where it said something.
        error: Option<Error>,
        /// How many leases were on it.
        leases: usize,
    },
    /// The session was closed in good order.
    SessionClosed {
        /// Backend process id.
        pid: i32,
    },
    /// A caller waits for a lease that is held elsewhere.
    Waiting {
        /// The lease.
        name: Arc<str>,
        /// Its key.
        key: Key,
    },
    /// Trying for leases failed; it is tried again.
    TryFailed {
        /// Why.
        error: Error,
    },
    /// A term begins.
    Acquired {
        /// The lease.
        name: Arc<str>,
        /// Its key.
        key: Key,
        /// Backend process id.
        pid: i32,
        /// The term's token.
        token: FencingToken,
    },
    /// A term ended by loss. Sent once for each lease.
    Lost {
        /// The lease.
        name: Arc<str>,
        /// Its key.
        key: Key,
        /// Backend process id.
        pid: i32,
        /// The term's token.
        token: FencingToken,
        /// Why.
        reason: LostReason,
    },
    /// A job has been told to stop.
    Stopping {
        /// The lease.
        name: Arc<str>,
        /// Its key.
        key: Key,
        /// Why.
        reason: CancelReason,
    },
    /// A job is still at work after its lease was lost. Sent every second.
    Overrun {
        /// The lease.
        name: Arc<str>,
        /// Its key.
        key: Key,
        /// The lost term's token.
        token: FencingToken,
        /// Time since the loss was noticed.
        since: Duration,
    },
    /// A term ended by release.
    Released {
        /// The lease.
        name: Arc<str>,
        /// Its key.
        key: Key,
        /// Backend process id.
        pid: i32,
        /// The term's token.
        token: FencingToken,
    },
    /// The server did not confirm an unlock: the session is closed, which releases the lock.
    ReleaseFailed {
        /// The lease.
        name: Arc<str>,
        /// Its key.
        key: Key,
        /// Backend process id.
        pid: i32,
        /// Why; `None` if the server said that the lock was not held.
        error: Option<Error>,
    },
    /// Events were dropped because `on_event` was slower than they came.
    Dropped {
        /// How many.
        count: u64,
    },
}

impl Event {
    /// The level at which the event is logged.
    #[must_use]
    pub fn level(&self) -> log::Level {
        match self {
            Event::SessionLost { leases: 1.., .. }
            | Event::Lost { .. }
            | Event::Overrun { .. }
            | Event::ReleaseFailed { .. } => log::Level::Error,
            Event::SessionLost { .. }
            | Event::ConnectFailed { .. }
            | Event::TryFailed { .. }
            | Event::Late { .. }
            | Event::BoundMissing { .. }
            | Event::NotifyUnavailable { .. }
            | Event::Dropped { .. } => log::Level::Warn,
            Event::Acquired { .. }
            | Event::Released { .. }
            | Event::Stopping { .. }
            | Event::LimitReplaced { .. } => log::Level::Info,
            Event::SessionOpened { .. } | Event::SessionClosed { .. } | Event::Waiting { .. } => {
                log::Level::Debug
            }
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::SessionOpened { pid, server_version, took } => {
                write!(f, "session opened pid={pid} server={server_version} took={took:.1?}")
            }
            Event::BoundMissing { setting, effect } => {
                write!(f, "server has no setting {setting}: {effect}")
            }
            Event::LimitReplaced { setting, configured, ours } => {
                write!(f, "limit replaced setting={setting} configured={configured} ours={ours}")
            }
            Event::NotifyUnavailable { pid } => {
                write!(f, "notifications do not arrive pid={pid}: polling for releases")
            }
            Event::ConnectFailed { error, retry_in } => {
                write!(f, "no session: {} retry_in={retry_in:.1?}", error.chain())
            }
            Event::Late { pid, used } => {
                write!(f, "answer is late pid={pid} used={:.0}%", used * 100.0)
            }
            Event::SessionLost { pid, reason, error, leases } => {
                write!(f, "session lost pid={pid} reason=\"{reason}\" leases={leases}")?;
                error.as_ref().map_or(Ok(()), |error| write!(f, ": {}", error.chain()))
            }
            Event::SessionClosed { pid } => write!(f, "session closed pid={pid}"),
            Event::Waiting { name, key } => write!(f, "waiting name={name:?} key={key}"),
            Event::TryFailed { error } => write!(f, "trying failed: {}", error.chain()),
            Event::Acquired { name, key, pid, token } => {
                write!(f, "acquired name={name:?} key={key} pid={pid} token={token}")
            }
            Event::Lost { name, key, pid, token, reason } => {
                write!(
                    f,
                    "lost name={name:?} key={key} pid={pid} token={token} reason=\"{reason}\""
                )
            }
            Event::Stopping { name, key, reason } => {
                write!(f, "stopping job name={name:?} key={key} reason=\"{reason}\"")
            }
            Event::Overrun { name, key, token, since } => write!(
                f,
                "job still runs after its loss name={name:?} key={key} token={token} since={since:.0?}"
            ),
            Event::Released { name, key, pid, token } => {
                write!(f, "released name={name:?} key={key} pid={pid} token={token}")
            }
            Event::ReleaseFailed { name, key, pid, error } => {
                write!(f, "release not confirmed name={name:?} key={key} pid={pid}")?;
                match error {
                    Some(error) => write!(f, ": {}", error.chain()),
                    None => f.write_str(": the server says that it was not held"),
                }
            }
            Event::Dropped { count } => write!(f, "events dropped count={count}"),
        }
    }
}

/// Called with each event, on a thread of its own.
pub(crate) type OnEvent = Arc<dyn Fn(&Event) + Send + Sync>;

/// How many events wait for a slow listener before more are dropped, and counted.
pub(crate) const QUEUE: usize = 4096;

/// Where events go: a queue, so that a slow logger or listener never delays a heartbeat.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    /// `None` asks the thread to end.
    queue: Sender<Option<Event>>,
    dropped: Arc<AtomicU64>,
}

impl Events {
    /// Starts the thread that logs and calls `on_event`. It ends when the last clone is dropped and
    /// the queue is empty.
    pub(crate) fn start(
        on_event: Option<OnEvent>,
    ) -> Result<(Events, thread::JoinHandle<()>), Error> {
        let (queue, incoming) = bounded(QUEUE);
        let dropped = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&dropped);
        let thread = thread::Builder::new()
            .name("leasehold-event".into())
            .spawn(move || deliver(&incoming, &counter, on_event.as_ref()))
            .map_err(|error| Error::Spawn(Arc::new(error)))?;
        Ok((Events { queue, dropped }, thread))
    }

    /// Queues an event. Never blocks.
    pub(crate) fn send(&self, event: Event) {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(Some(event)) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends the thread when it has told what is queued. Blocks until `end` if the queue is full.
    pub(crate) fn stop(&self, end: Instant) {
        if self.queue.send_deadline(None, end).is_err() {
            log::debug!(target: "leasehold", "events are not read, or not any more");
        }
    }
}

fn deliver(incoming: &Receiver<Option<Event>>, dropped: &AtomicU64, on_event: Option<&OnEvent>) {
    for event in incoming.iter().map_while(|event| event) {
        tell(&event, on_event);
        let count = dropped.swap(0, Ordering::Relaxed);
        if count > 0 {
            tell(&Event::Dropped { count }, on_event);
        }
    }
}

fn tell(event: &Event, on_event: Option<&OnEvent>) {
    log::log!(target: "leasehold", event.level(), "{event}");
    let Some(on_event) = on_event else { return };
    // A listener that panics must not silence the ones after it.
    let call = std::panic::AssertUnwindSafe(|| on_event(event));
    if std::panic::catch_unwind(call).is_err() {
        log::error!(target: "leasehold", "on_event panicked; events go on");
    }
}

#[cfg(test)]
#[cfg(not(leasehold_loom))]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    fn waiting(i: usize) -> Event {
        Event::Waiting { name: format!("n{i}").into(), key: Key::from_i64(0) }
    }

    #[test]
    fn events_arrive_in_order_and_the_thread_ends_with_the_last_handle() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let on_event: OnEvent = Arc::new(move |e| log.lock().unwrap().push(e.to_string()));
        let (events, thread) = Events::start(Some(on_event)).unwrap();
        (0..100).for_each(|i| events.send(waiting(i)));
        drop(events);
        thread.join().unwrap();
        let expected: Vec<String> = (0..100).map(|i| waiting(i).to_string()).collect();
        assert_eq!(*seen.lock().unwrap(), expected);
    }

    #[test]
    fn a_stuck_listener_never_blocks_the_sender_and_is_told_what_it_missed() {
        let (release, gate) = channel::<()>();
        let gate = Mutex::new(gate);
        let missed = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&missed);
        let on_event: OnEvent = Arc::new(move |event| match event {
            Event::Dropped { count: n } => {
                count.fetch_add(*n, Ordering::SeqCst);
            }
            _ => drop(gate.lock().unwrap().recv()),
        });
        let (events, thread) = Events::start(Some(on_event)).unwrap();
        (0..QUEUE + 100).for_each(|i| events.send(waiting(i)));
        drop(release);
        drop(events);
        thread.join().unwrap();
        let missed = missed.load(Ordering::SeqCst);
        assert!((99..=100).contains(&missed), "{missed}");
    }

    #[test]
    fn a_listener_that_panics_hears_the_next_event() {
        let calls = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&calls);
        let on_event: OnEvent = Arc::new(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            panic!("a listener's panic, part of the test");
        });
        let (events, thread) = Events::start(Some(on_event)).unwrap();
        (0..3).for_each(|i| events.send(waiting(i)));
        drop(events);
        thread.join().unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 3);
    }
}
