//! The error type, and the reasons for which a lease can be lost.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use postgres::error::SqlState;

use crate::key::Key;

/// Why a lease was lost while its job might still have been at work.
///
/// Losing a lease is sticky: a lost [`Lease`](crate::Lease) never becomes held again, not even when
/// the same process wins the name anew, which is another term.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The server ended the session: terminated, stopped, crashed, or the connection was reset.
    SessionEnded,
    /// No answer from the server until the deadline, heartbeat interval plus query time-out after
    /// the start of the last answered statement. The server may keep the lock for a while yet.
    NoAnswer,
    /// The session is there, and `pg_locks` says that it does not hold the lock.
    NotOwner,
    /// The server became a standby, or changed its timeline: another server is the primary now.
    Demoted,
    /// Statements of one session ran on another: a transaction pooler is in between.
    SessionSwapped,
    /// The session was closed by this process, because a statement failed in a way that left a
    /// lock in doubt.
    InDoubt,
    /// This is a forked child: the lease belongs to the parent.
    Forked,
}

impl LostReason {
    pub(crate) const ALL: [LostReason; 7] = [
        LostReason::SessionEnded,
        LostReason::NoAnswer,
        LostReason::NotOwner,
        LostReason::Demoted,
        LostReason::SessionSwapped,
        LostReason::InDoubt,
        LostReason::Forked,
    ];
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LostReason::SessionEnded => "the server ended the session",
            LostReason::NoAnswer => "no answer before the deadline",
            LostReason::NotOwner => "the session does not hold the lock any more",
            LostReason::Demoted => "the server is not the primary any more",
            LostReason::SessionSwapped => "a pooler swapped the session",
            LostReason::InDoubt => "the session was closed because a lock was in doubt",
            LostReason::Forked => "the lease belongs to the parent process",
        })
    }
}

/// Which time limit passed, and how long it was.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Timeout {
    /// Connecting, including name resolution, start-up and the proof of the endpoint.
    Connect(Duration),
    /// A statement, named as in the server's log.
    Query(&'static str, Duration),
    /// The thread that owns the session did not get to the request in time.
    Session(Duration),
    /// [`close_timeout`](crate::Locker::close_timeout): these jobs had not returned.
    Close(Duration, Arc<[String]>),
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Timeout::Connect(d) => write!(f, "connecting took longer than {d:?}"),
            Timeout::Query(statement, d) => {
                write!(f, "statement `{statement}` was not answered within {d:?}")
            }
            Timeout::Session(d) => {
                write!(f, "the session was busy or connecting for longer than {d:?}")
            }
            Timeout::Close(d, jobs) => {
                write!(f, "after {d:?} these jobs had not returned: {}", jobs.join(", "))
            }
        }
    }
}

/// Why [`Lease::guard`](crate::Lease::guard) refused a transaction.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GuardRefusal {
    /// It is on another database than the lease.
    OtherDatabase,
    /// It is on another server than the lease.
    OtherServer,
    /// It is read-only, so it has nothing to guard.
    ReadOnly,
}

impl fmt::Display for GuardRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GuardRefusal::OtherDatabase => "it is on another database than the lease",
            GuardRefusal::OtherServer => "it is on another server than the lease",
            GuardRefusal::ReadOnly => "it is read-only, so it has nothing to guard",
        })
    }
}

/// What went wrong.
///
/// Texts are lower case, tell their own layer only, and say what to do where there is something
/// to do; the cause is in [`source`](std::error::Error::source).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name is running or held on this `Locker` already. The database was not asked.
    #[error("this name is already running or held on this Locker")]
    AlreadyRunning,
    /// Another name that is in use on this `Locker` has the same key.
    #[error("another name in use on this Locker has the same key, {0}: rename one of them")]
    KeyCollision(Key),
    /// The lock is held elsewhere; in module [`lock`](crate::lock) also: no connection of the pool
    /// was free in time.
    #[error("held elsewhere")]
    NotAcquired,
    /// The lock is not held, or not any more.
    #[error("not held")]
    NotHeld,
    /// The `Locker`, or the locker of module [`lock`](crate::lock), was closed.
    #[error("the locker is closed")]
    Closed,
    /// The thread that owns the session panicked, which is a bug, here or in the TLS library under
    /// the session. Its leases are lost, and this `Locker` is of no more use.
    #[error("the thread that owns the session panicked: this Locker is of no more use")]
    Panicked,
    /// The cancellation token was set.
    #[error("cancelled")]
    Cancelled,
    /// The lease was lost.
    #[error("lease lost: {0}")]
    Lost(LostReason),
    /// Names have at least one character.
    #[error("the name is empty")]
    EmptyName,
    /// A time to live of zero, or beyond what the server can keep: 2^31 - 1 ms, almost 25 days.
    #[error("invalid time to live: must be more than zero and at most 2147483647 ms (24.8 days)")]
    InvalidTtl,
    /// An option, or a combination of options, that cannot work; the text is the violated rule.
    #[error("invalid option: {0}")]
    InvalidOption(Arc<str>),
    /// The endpoint is a transaction pooler, or answers lock functions without locking.
    #[error(
        "this endpoint does not keep one server session per connection, so it cannot hold a lock: \
         connect to PostgreSQL directly, or to a pooler in session mode (PgBouncer: pool_mode = session)"
    )]
    TransactionPooling,
    /// The server is a hot standby.
    #[error(
        "the server is a hot standby, whose locks mean nothing on the primary: connect to the \
         primary, or list all hosts with target_session_attrs=read-write"
    )]
    NotPrimary,
    /// The server's lock table is full. The session is still good.
    #[error(
        "the server's lock table is full: raise max_locks_per_transaction on the server, or hold fewer leases"
    )]
    LockTableFull,
    /// The server's timeline or transaction ids are beyond what a fencing token can carry.
    #[error("the server's timeline or transaction id is beyond the range of fencing tokens")]
    TokenExhausted,
    /// The server is older than PostgreSQL 13; the number is its `server_version_num`.
    #[error("server version {0} is not supported: PostgreSQL 13 or later is needed")]
    UnsupportedServer(i32),
    /// [`Lease::guard`](crate::Lease::guard): the transaction cannot be guarded.
    #[error("the transaction cannot be guarded: {0}")]
    Guard(GuardRefusal),
    /// A circuit breaker is open.
    #[error("the circuit breaker is open")]
    CircuitOpen,
    /// This process is a forked child of the one that made the `Locker`.
    #[error("this is a forked child: make a new Locker after the fork")]
    Forked,
    /// A time limit passed.
    #[error("timed out: {0}")]
    Timeout(Timeout),
    /// Connecting failed.
    #[error("cannot connect to the database")]
    Connect(#[source] Arc<postgres::Error>),
    /// A statement failed, named as in the server's log.
    #[error("statement `{statement}` failed")]
    Query {
        /// The statement's name, as in the comment it starts with.
        statement: &'static str,
        /// What the driver or the server said.
        #[source]
        source: Arc<postgres::Error>,
    },
    /// The server answered with something that makes no sense for the statement.
    #[error("statement `{0}` was answered with something that it cannot mean")]
    Protocol(&'static str),
    /// A pool of the user's gave no connection because connecting failed. The reason is in the text
    /// of the source, an error of `r2d2` 0.8, and not behind it.
    #[error("the pool gave no connection")]
    Pool(#[source] Arc<r2d2::Error>),
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Spawn(#[source] Arc<std::io::Error>),
}

impl Error {
    /// True for [`Error::Timeout`], and for a statement that the server cancelled at its
    /// `statement_timeout`, or because somebody asked it to: SQLSTATE 57014 does not tell which.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Error::Timeout(_)) || self.sqlstate() == Some(&SqlState::QUERY_CANCELED)
    }

    /// True for [`Error::Lost`] and [`Error::NotHeld`]: what was held before is not held any more,
    /// or never was.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Error::Lost(_) | Error::NotHeld)
    }

    /// True if the same call can succeed later without a change of program, options or endpoint.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::AlreadyRunning
            | Error::NotAcquired
            | Error::NotPrimary
            | Error::LockTableFull
            | Error::CircuitOpen
            | Error::Timeout(_)
            | Error::Connect(_)
            | Error::Query { .. }
            | Error::Protocol(_)
            | Error::Pool(_)
            | Error::Spawn(_)
            | Error::Lost(_)
            | Error::NotHeld => true,
            Error::KeyCollision(_)
            | Error::Closed
            | Error::Panicked
            | Error::Cancelled
            | Error::EmptyName
            | Error::InvalidTtl
            | Error::InvalidOption(_)
            | Error::TransactionPooling
            | Error::TokenExhausted
            | Error::UnsupportedServer(_)
            | Error::Guard(_)
            | Error::Forked => false,
        }
    }

    /// The server's SQLSTATE, where the cause has one.
    #[must_use]
    pub fn sqlstate(&self) -> Option<&SqlState> {
        match self {
            Error::Connect(source) | Error::Query { source, .. } => source.code(),
            _ => None,
        }
    }

    /// The error and its causes in one line, for logs: `outer: inner: innermost`.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            let layer = error.to_string().replace('\n', " ");
            if !text.ends_with(&layer) {
                text.push_str(": ");
                text.push_str(&layer);
            }
            cause = error.source();
        }
        text
    }

    pub(crate) fn invalid(rule: impl Into<Arc<str>>) -> Error {
        Error::InvalidOption(rule.into())
    }
}

/// What [`Locker::run`](crate::Locker::run) and [`try_run`](crate::Locker::try_run) fail with:
/// the job's own error, or ours.
#[derive(Clone, Debug)]
pub enum RunError<E> {
    /// The job returned this error while it held the lease.
    Job(E),
    /// The lease could not be had, or was lost.
    Lock(Error),
}

impl<E: fmt::Display> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Job(error) => error.fmt(f),
            RunError::Lock(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error> std::error::Error for RunError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            RunError::Job(error) => error.source(),
            RunError::Lock(error) => std::error::Error::source(error),
        }
    }
}

impl<E> From<Error> for RunError<E> {
    fn from(error: Error) -> RunError<E> {
        RunError::Lock(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_small_enough_to_return_by_value() {
        assert!(size_of::<Error>() <= 48, "{}", size_of::<Error>());
    }

    #[test]
    fn texts_are_lower_case_and_have_no_full_stop() {
        let errors = [
            Error::AlreadyRunning,
            Error::TransactionPooling,
            Error::NotPrimary,
            Error::LockTableFull,
            Error::Forked,
            Error::invalid("retry_interval (0ns) > 0"),
            Error::Lost(LostReason::NoAnswer),
            Error::Timeout(Timeout::Connect(Duration::from_secs(1))),
        ];
        for text in errors.map(|e| e.to_string()) {
            assert!(text.starts_with(|c: char| c.is_lowercase()), "{text}");
            assert!(!text.ends_with('.'), "{text}");
        }
    }

    #[test]
    fn the_chain_names_every_cause_once() {
        let io = std::io::Error::other("no more threads");
        assert_eq!(Error::Spawn(Arc::new(io)).chain(), "cannot start a thread: no more threads");
    }

    #[test]
    fn errors_cross_threads() {
        fn check<T: Send + Sync + 'static>() {}
        check::<Error>();
        check::<RunError<std::io::Error>>();
    }
}
