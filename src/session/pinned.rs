//! A session that is checked out of a pool, and what locks do with it.
//!
//! # Protocol
//!
//! A session goes back to its pool only by [`Pinned::give_back`]. Any other end, a panic and a
//! caller that went away included, ends the session, and the server frees what it held: a lock in
//! doubt is never handed to the next user of the pool.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use postgres::error::{DbError, Severity, SqlState};
use postgres::types::{ToSql, Type};
use postgres::{CancelToken, Row, SimpleQueryMessage};

use super::foreign::{self, Foreign};
use super::lock_statements as sql;
use super::pool::Manager;
use super::shelf::Shelf;
use super::statements::Sql;
use super::transport::Guard;
use super::{Facts, get, one, timeline};
use crate::error::{Error, LostReason};
use crate::token::FencingToken;

/// How often the idle session is asked who it is while another session is pinned.
const PROOF_ROUNDS: usize = 6;
/// `idle_session_timeout` came with PostgreSQL 14.
const IDLE_TIMEOUT_SINCE: i32 = 140_000;

enum Inner {
    Guarded(r2d2::PooledConnection<Manager>, Duration, Weak<Shelf>),
    Foreign(Box<dyn Foreign>),
}

/// A session out of a pool; see the head of this file.
pub(crate) struct Pinned {
    /// `None` once it went back.
    inner: Option<Inner>,
}

/// What a try came to.
pub(crate) struct Attempt {
    pub(crate) pid: i32,
    pub(crate) granted: bool,
    /// The session's former idle limit; `None` before PostgreSQL 14.
    pub(crate) idle: Option<String>,
}

/// What taking a scoped lock came to.
pub(crate) struct Scoped {
    pub(crate) pid: i32,
    pub(crate) granted: bool,
}

type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// An error of the driver under the name of a statement.
pub(crate) fn query_error(statement: &'static str, source: postgres::Error) -> Error {
    if source.code() == Some(&SqlState::OUT_OF_MEMORY) {
        return Error::LockTableFull;
    }
    Error::Query { statement, source: Arc::new(source) }
}

impl Pinned {
    pub(crate) fn guarded(
        connection: r2d2::PooledConnection<Manager>,
        query_timeout: Duration,
        shelf: &Arc<Shelf>,
    ) -> Pinned {
        let shelf = Arc::downgrade(shelf);
        Pinned { inner: Some(Inner::Guarded(connection, query_timeout, shelf)) }
    }

    pub(crate) fn foreign(connection: impl Foreign + 'static) -> Pinned {
        Pinned { inner: Some(Inner::Foreign(Box::new(connection))) }
    }

    /// Back into the pool. Only for a session that holds nothing of ours and has no settings of
    /// ours.
    pub(crate) fn give_back(mut self) {
        match self.inner.take() {
            Some(Inner::Guarded(mut pooled, _, shelf)) => match shelf.upgrade() {
                Some(shelf) if pooled.rest() => shelf.put(pooled),
                _ => drop(pooled),
            },
            other => drop(other),
        }
    }

    /// True if statements on it end by themselves.
    pub(crate) fn is_guarded(&self) -> bool {
        match &self.inner {
            Some(Inner::Guarded(pooled, ..)) => pooled.is_guarded(),
            _ => false,
        }
    }

    /// True once the session cannot be used any more.
    pub(crate) fn is_broken(&mut self) -> bool {
        match &mut self.inner {
            Some(Inner::Guarded(pooled, ..)) => {
                pooled.session().is_none_or(|session| session.is_broken())
            }
            Some(Inner::Foreign(foreign)) => foreign.client().is_closed(),
            None => true,
        }
    }

    /// True if `error` came with the end of the session. A client without a guard finds the socket
    /// closed only when it reads again: the server's farewell says it at once.
    pub(crate) fn is_gone(&mut self, error: &Error) -> bool {
        let farewell = match error {
            Error::Query { source, .. } => {
                let severity = source.as_db_error().and_then(DbError::parsed_severity);
                source.is_closed() || matches!(severity, Some(Severity::Fatal | Severity::Panic))
            }
            _ => false,
        };
        farewell || self.is_broken()
    }

    /// What kills the session at once, where there is such a thing.
    pub(crate) fn guard(&mut self) -> Option<Arc<Guard>> {
        match &mut self.inner {
            Some(Inner::Guarded(pooled, ..)) => pooled.session()?.guard().cloned(),
            _ => None,
        }
    }

    pub(crate) fn cancel_token(&mut self) -> Option<CancelToken> {
        match &mut self.inner {
            Some(Inner::Guarded(pooled, ..)) => Some(pooled.session()?.client.cancel_token()),
            Some(Inner::Foreign(foreign)) => Some(foreign.client().cancel_token()),
            None => None,
        }
    }

    /// What is known without asking.
    fn facts(&mut self) -> Option<Facts> {
        match &mut self.inner {
            Some(Inner::Guarded(pooled, ..)) => Some(pooled.session()?.facts),
            _ => None,
        }
    }

    /// The server's version, if it is known without asking.
    pub(crate) fn known_version(&mut self) -> Option<i32> {
        self.facts().map(|facts| facts.version)
    }

    fn rows(&mut self, sql: Sql, params: &[Param<'_>]) -> Result<Vec<Row>, Error> {
        match &mut self.inner {
            Some(Inner::Guarded(pooled, ..)) => {
                let values: Vec<_> = params.iter().map(|(value, _)| *value).collect();
                pooled.session().ok_or(Error::NotHeld)?.prepared(sql, &values)
            }
            Some(Inner::Foreign(foreign)) => {
                let result = foreign.client().query_typed(sql.text, params);
                result.map_err(|source| query_error(sql.name, source))
            }
            None => Err(Error::NotHeld),
        }
    }

    fn simple(
        &mut self,
        statement: &'static str,
        text: &str,
        limit: Option<Duration>,
    ) -> Result<Vec<SimpleQueryMessage>, Error> {
        match &mut self.inner {
            Some(Inner::Guarded(pooled, ..)) => {
                let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
                let session = pooled.session().ok_or(Error::NotHeld)?;
                session.exchange(statement, deadline, |client| client.simple_query(text))
            }
            Some(Inner::Foreign(foreign)) => {
                let result = foreign.client().simple_query(text);
                result.map_err(|source| query_error(statement, source))
            }
            None => Err(Error::NotHeld),
        }
    }

    fn query_timeout(&self) -> Option<Duration> {
        match &self.inner {
            Some(Inner::Guarded(_, timeout, _)) => Some(*timeout),
            _ => None,
        }
    }

    /// Tries for `key`; `idle` is the time to live that the server is to enforce.
    pub(crate) fn try_lock(
        &mut self,
        key: i64,
        shared: bool,
        idle: Option<&str>,
    ) -> Result<Attempt, Error> {
        if let Some(facts) = self.facts() {
            return self.try_lock_known(facts, key, shared, idle);
        }
        let sql = if shared { sql::LOCK_TRY_SHARED } else { sql::LOCK_TRY };
        let rows = self.rows(sql, &[(&key, Type::INT8), (&idle, Type::TEXT)])?;
        let row = one(sql, &rows)?;
        if get(sql, row, 1)? {
            return Err(Error::NotPrimary);
        }
        let granted = get::<Option<bool>>(sql, row, 2)?.ok_or(Error::Protocol(sql.name))?;
        Ok(Attempt { pid: get(sql, row, 0)?, granted, idle: get(sql, row, 3)? })
    }

    /// [`Pinned::try_lock`] on a session that was proved, and has our settings.
    fn try_lock_known(
        &mut self,
        facts: Facts,
        key: i64,
        shared: bool,
        idle: Option<&str>,
    ) -> Result<Attempt, Error> {
        let sql = if shared { sql::LOCK_TRY_KNOWN_SHARED } else { sql::LOCK_TRY_KNOWN };
        let has_limit = facts.version >= IDLE_TIMEOUT_SINCE;
        let idle = idle.filter(|_| has_limit);
        let rows = self.rows(sql, &[(&key, Type::INT8), (&idle, Type::TEXT)])?;
        let granted = get::<Option<&str>>(sql, one(sql, &rows)?, 0)?.is_some();
        Ok(Attempt { pid: facts.pid, granted, idle: has_limit.then(|| "0".to_owned()) })
    }

    /// Unlocks `key` and sets the idle limit to `idle`. False if it was not held.
    pub(crate) fn unlock(
        &mut self,
        (key, pid): (i64, i32),
        shared: bool,
        idle: Option<&str>,
    ) -> Result<bool, Error> {
        let sql = if shared { sql::LOCK_RELEASE_SHARED } else { sql::LOCK_RELEASE };
        let rows = self.rows(sql, &[(&key, Type::INT8), (&idle, Type::TEXT)])?;
        let row = one(sql, &rows)?;
        same_session(get(sql, row, 0)?, pid)?;
        get(sql, row, 1)
    }

    /// Proves that `key` is held and sets the idle limit to `idle`. False if it is not held.
    pub(crate) fn refresh(
        &mut self,
        (key, pid): (i64, i32),
        shared: bool,
        idle: Option<&str>,
    ) -> Result<bool, Error> {
        let sql = sql::LOCK_REFRESH;
        let [a, b, c, d, e, f, g, h] = key.to_be_bytes();
        let classid = u32::from_be_bytes([a, b, c, d]);
        let objid = u32::from_be_bytes([e, f, g, h]);
        let mode = if shared { "ShareLock" } else { "ExclusiveLock" };
        let params: [Param<'_>; 4] =
            [(&classid, Type::OID), (&objid, Type::OID), (&mode, Type::TEXT), (&idle, Type::TEXT)];
        let rows = self.rows(sql, &params)?;
        let row = one(sql, &rows)?;
        same_session(get(sql, row, 0)?, pid)?;
        get(sql, row, 1)
    }

    /// Takes a token, under a lock that is held.
    pub(crate) fn token(&mut self, pid: i32) -> Result<FencingToken, Error> {
        let sql = sql::LOCK_TOKEN;
        let rows = self.rows(sql, &[])?;
        let row = one(sql, &rows)?;
        same_session(get(sql, row, 0)?, pid)?;
        let xid = get::<String>(sql, row, 1)?.parse().map_err(|_| Error::Protocol(sql.name))?;
        let timeline = timeline(sql, Some(get(sql, row, 2)?))?;
        FencingToken::new(timeline, xid).ok_or(Error::TokenExhausted)
    }

    /// Asks who answers: backend pid and version. Refuses a standby.
    pub(crate) fn ping(&mut self) -> Result<(i32, i32), Error> {
        let sql = sql::LOCK_PING;
        let rows = self.rows(sql, &[])?;
        let row = one(sql, &rows)?;
        if get(sql, row, 1)? {
            return Err(Error::NotPrimary);
        }
        Ok((get(sql, row, 0)?, get(sql, row, 2)?))
    }

    /// Proves that this session, which is idle, and `other` are kept apart by the endpoint: see
    /// `connect`.
    pub(crate) fn prove_apart(&mut self, other: &mut Pinned) -> Result<(), Error> {
        let limit = other.query_timeout();
        let (pid, _) = self.ping()?;
        if let Err(error) = other.simple(sql::LOCK_PIN.name, sql::LOCK_PIN.text, limit) {
            let pooler = error.sqlstate().is_some_and(|state| state.code().starts_with("08"));
            return Err(if pooler { Error::TransactionPooling } else { error });
        }
        same_session(i32::from(other.ping()?.0 == pid), 0)?;
        for _ in 0..PROOF_ROUNDS {
            same_session(self.ping()?.0, pid)?;
        }
        other.simple(sql::SCOPE_ROLLBACK.name, sql::SCOPE_ROLLBACK.text, limit).map(drop)
    }

    /// Opens a transaction and takes a lock in it; waits for at most `limit`, without one until
    /// the server answers or the guard is killed.
    pub(crate) fn begin(
        &mut self,
        scope: &sql::ScopeBegin,
        limit: Option<Duration>,
    ) -> Result<Scoped, Error> {
        let name = sql::SCOPE_BEGIN;
        let messages = self.simple(name, &sql::scope_begin(scope), limit)?;
        let row = messages.iter().rev().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let row = row.ok_or(Error::Protocol(name))?;
        let column = |i| row.try_get(i).ok().flatten().ok_or(Error::Protocol(name));
        if column(1)? == "t" {
            return Err(Error::NotPrimary);
        }
        let pid = column(0)?.parse().map_err(|_| Error::Protocol(name))?;
        Ok(Scoped { pid, granted: scope.wait || column(2)? == "t" })
    }

    /// Ends the transaction. An error means that the lock was lost, before or now.
    pub(crate) fn commit(&mut self) -> Result<(), Error> {
        let limit = self.query_timeout();
        self.simple(sql::SCOPE_COMMIT.name, sql::SCOPE_COMMIT.text, limit).map(drop)
    }

    /// Ends the transaction.
    pub(crate) fn rollback(&mut self) -> Result<(), Error> {
        let limit = self.query_timeout();
        self.simple(sql::SCOPE_ROLLBACK.name, sql::SCOPE_ROLLBACK.text, limit).map(drop)
    }

    /// Statements from now on end by `instant`.
    pub(crate) fn end_by(&mut self, instant: Option<Instant>) {
        if let Some(Inner::Guarded(pooled, ..)) = &mut self.inner {
            if let Some(session) = pooled.session() {
                session.end_by(instant);
            }
        }
    }

    /// Why the session is gone, after an error on it.
    pub(crate) fn loss(&mut self, error: &Error) -> LostReason {
        match error {
            Error::Timeout(_) => LostReason::NoAnswer,
            Error::TransactionPooling => LostReason::SessionSwapped,
            _ if self.is_gone(error) => LostReason::SessionEnded,
            _ => LostReason::InDoubt,
        }
    }
}

fn same_session(seen: i32, expected: i32) -> Result<(), Error> {
    if seen == expected { Ok(()) } else { Err(Error::TransactionPooling) }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        match self.inner.take() {
            Some(Inner::Guarded(mut pooled, ..)) => pooled.poison(),
            Some(Inner::Foreign(client)) => foreign::end(client),
            None => {}
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("guarded", &self.is_guarded()).finish_non_exhaustive()
    }
}
