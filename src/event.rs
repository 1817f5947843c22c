//! What happens to leases and their session, told to `log` and to
//! [`Options::on_event`](crate::Options::on_event), in order.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::cancel::CancelReason;
use crate::error::{Error, LostReason};
use crate::key::Key;
use crate::token::FencingToken;

mod lock;
mod queue;

pub use lock::LockEvent;
pub(crate) use queue::{Events, OnEvent};

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
    /// Watching the holders' sessions failed; it is tried again, and standbys poll meanwhile.
    WatchFailed {
        /// Why.
        error: Error,
        /// The wait before the next attempt.
        retry_in: Duration,
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
    /// A term cannot start yet: these backends have guarded transactions of an earlier term open.
    Fenced {
        /// The lease.
        name: Arc<str>,
        /// Its key.
        key: Key,
        /// The backends.
        pids: Vec<i32>,
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
    /// Something happened to a lock of module [`lock`](crate::lock).
    Lock {
        /// Its key, as given.
        name: Arc<str>,
        /// Its key on the server.
        key: Key,
        /// What happened.
        what: LockEvent,
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
            | Event::WatchFailed { .. }
            | Event::Late { .. }
            | Event::BoundMissing { .. }
            | Event::Fenced { .. }
            | Event::NotifyUnavailable { .. }
            | Event::Dropped { .. } => log::Level::Warn,
            Event::Lock { what, .. } => what.level(),
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

/// How much of a name is logged, in characters.
const LONGEST_LOGGED: usize = 100;

/// A name as it is logged: quoted, and no longer than a line bears.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(LONGEST_LOGGED) {
            Some((end, _)) => write!(f, "{:?}..", &self.0[..end]),
            None => write!(f, "{:?}", self.0),
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
            Event::Waiting { name, key } => write!(f, "waiting name={} key={key}", Quoted(name)),
            Event::WatchFailed { error, retry_in } => {
                write!(f, "cannot watch: {} retry_in={retry_in:.1?}", error.chain())
            }
            Event::TryFailed { error } => write!(f, "trying failed: {}", error.chain()),
            Event::Acquired { name, key, pid, token } => {
                write!(f, "acquired name={} key={key} pid={pid} token={token}", Quoted(name))
            }
            Event::Fenced { name, key, pids } => {
                write!(
                    f,
                    "waiting for guarded transactions name={} key={key} pids={pids:?}",
                    Quoted(name)
                )
            }
            Event::Lost { name, key, pid, token, reason } => {
                write!(
                    f,
                    "lost name={} key={key} pid={pid} token={token} reason=\"{reason}\"",
                    Quoted(name)
                )
            }
            Event::Stopping { name, key, reason } => {
                write!(f, "stopping job name={} key={key} reason=\"{reason}\"", Quoted(name))
            }
            Event::Overrun { name, key, token, since } => write!(
                f,
                "job still runs after its loss name={} key={key} token={token} since={since:.0?}",
                Quoted(name)
            ),
            Event::Released { name, key, pid, token } => {
                write!(f, "released name={} key={key} pid={pid} token={token}", Quoted(name))
            }
            Event::ReleaseFailed { name, key, pid, error } => {
                write!(f, "release not confirmed name={} key={key} pid={pid}", Quoted(name))?;
                match error {
                    Some(error) => write!(f, ": {}", error.chain()),
                    None => f.write_str(": the server says that it was not held"),
                }
            }
            Event::Lock { name, key, what } => {
                write!(f, "lock {what} name={} key={key}", Quoted(name))
            }
            Event::Dropped { count } => write!(f, "events dropped count={count}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_in_every_line() {
        let name: Arc<str> = "é".repeat(5000).into();
        let key = Key::new(0, &name);
        let events = [
            Event::Waiting { name: Arc::clone(&name), key },
            Event::Lock { name, key, what: LockEvent::Contended },
        ];
        for text in events.map(|event| event.to_string()) {
            assert!(text.chars().count() < 200, "{text}");
        }
    }
}
