//! One session: a client that cannot hang, and the statements that leases and locks need.
//!
//! Nothing here knows what a lease is. A session is opened and proved by [`connect`], and from then
//! on used by one thread. Every method is bounded by the query time-out, or sooner by
//! [`Session::end_by`]; after a time-out the session is [broken](Session::is_broken) for good.

pub(crate) mod connect;
pub(crate) mod foreign;
pub(crate) mod lock_statements;
mod patient;
pub(crate) mod pinned;
pub(crate) mod pool;
mod proof;
pub(crate) mod shelf;
pub(crate) mod statements;
pub(crate) mod tls;
pub(crate) mod transport;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use postgres::error::{Severity, SqlState};
use postgres::fallible_iterator::FallibleIterator;
use postgres::types::ToSql;
use postgres::{Client, Row, Statement};

use crate::error::{Error, Timeout};
use crate::token::FencingToken;
use statements::Sql;
use transport::{Guard, WAKE_CHANNEL};

/// How long closing in good order may take, on a server that answers.
const CLOSE_BOUND: Duration = Duration::from_secs(1);

/// The class of beacons among advisory locks with two keys: the bytes of `beac`.
pub(crate) const BEACON_CLASS: i32 = i32::from_be_bytes(*b"beac");

/// Who is at the other end, and who we are to it.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub(crate) struct Facts {
    pub(crate) pid: i32,
    pub(crate) version: i32,
    pub(crate) database: u32,
    pub(crate) standby: bool,
    pub(crate) timeline: u32,
    /// When the server was started, in seconds of the epoch: no two servers have the same.
    pub(crate) server_start: f64,
    /// The second key of this session's beacon: tells it from a later one with the same pid.
    pub(crate) beacon: i32,
}

/// What a heartbeat says.
#[derive(Debug)]
pub(crate) struct Pulse {
    pub(crate) pid: i32,
    pub(crate) standby: bool,
    pub(crate) timeline: u32,
    pub(crate) missing: Vec<i64>,
}

/// Which keys were granted, and under which token.
#[derive(Debug, Default)]
pub(crate) struct Granted {
    pub(crate) keys: HashSet<i64>,
    /// Those whose fence is busy: a guarded transaction of an earlier term is open.
    pub(crate) fenced: HashSet<i64>,
    pub(crate) token: Option<FencingToken>,
}

/// A session that holds a key, as the server shows it to us.
#[derive(Debug)]
pub(crate) struct HolderRow {
    pub(crate) pid: i32,
    pub(crate) application_name: Option<String>,
    pub(crate) client_addr: Option<String>,
    pub(crate) backend_start: Option<SystemTime>,
}

/// A client under its guard.
pub(crate) struct Session {
    client: Client,
    /// `None` over a Unix socket, where the driver offers no hook.
    guard: Option<Arc<Guard>>,
    prepared: HashMap<&'static str, Statement>,
    query_timeout: Duration,
    end_by: Option<Instant>,
    /// A statement failed in a way that only a dead connection fails.
    dead: bool,
    pub(crate) facts: Facts,
    pub(crate) notify_works: bool,
}

impl Session {
    fn new(client: Client, guard: Option<Arc<Guard>>, query_timeout: Duration) -> Session {
        let prepared = HashMap::new();
        let (end_by, notify_works, facts) = (None, false, Facts::default());
        Session { client, guard, prepared, query_timeout, end_by, dead: false, facts, notify_works }
    }

    /// What wakes a thread parked in [`Session::park`].
    pub(crate) fn guard(&self) -> Option<&Arc<Guard>> {
        self.guard.as_ref()
    }

    /// Statements from now on end at `instant` if that is sooner than the query time-out.
    pub(crate) fn end_by(&mut self, instant: Option<Instant>) {
        self.end_by = instant;
    }

    /// True once the session cannot be used any more.
    pub(crate) fn is_broken(&self) -> bool {
        let killed = self.guard.as_ref().is_some_and(|guard| guard.is_dead());
        self.dead || killed || self.client.is_closed()
    }

    /// Notes what a failure says of the connection: an error that the server did not send, or one
    /// with which it ended the session, is the end of it.
    fn failed(&mut self, error: &postgres::Error) {
        self.dead |= error.as_db_error().is_none_or(|error| {
            // Poolers send the severity as text only.
            matches!(error.parsed_severity(), Some(Severity::Fatal | Severity::Panic))
                || matches!(error.severity(), "FATAL" | "PANIC")
        });
    }

    fn bounded<R>(
        &mut self,
        sql: Sql,
        work: impl FnOnce(&mut Session) -> Result<R, postgres::Error>,
    ) -> Result<R, Error> {
        let start = Instant::now();
        let own = start + self.query_timeout;
        let deadline = self.end_by.map_or(own, |end| end.min(own));
        if let Some(guard) = &self.guard {
            guard.arm(deadline);
        }
        let result = work(self);
        let dead = self.guard.as_ref().is_some_and(|guard| {
            guard.disarm();
            guard.is_dead()
        });
        result.map_err(|source| {
            self.failed(&source);
            if dead {
                Error::Timeout(Timeout::Query(sql.name, start.elapsed()))
            } else if source.code() == Some(&SqlState::OUT_OF_MEMORY) {
                Error::LockTableFull
            } else {
                Error::Query { statement: sql.name, source: Arc::new(source) }
            }
        })
    }

    /// Runs a statement that is prepared once for each session: one round trip from then on.
    fn query(&mut self, sql: Sql, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Error> {
        self.bounded(sql, |session| {
            let statement = match session.prepared.get(sql.name) {
                Some(statement) => statement.clone(),
                None => {
                    let statement = session.client.prepare(sql.text)?;
                    session.prepared.insert(sql.name, statement.clone());
                    statement
                }
            };
            session.client.query(&statement, params)
        })
    }

    /// Runs a statement once: one round trip, and nothing left on the server.
    fn query_once(
        &mut self,
        sql: Sql,
        params: &[(&(dyn ToSql + Sync), postgres::types::Type)],
    ) -> Result<Vec<Row>, Error> {
        self.bounded(sql, |session| session.client.query_typed(sql.text, params))
    }

    fn simple(&mut self, sql: Sql) -> Result<(), Error> {
        self.bounded(sql, |session| session.client.batch_execute(sql.text))
    }

    /// Tries for `keys`, and for the fence of each that is granted. After an error any of them may
    /// be locked: [ask](Session::ask).
    pub(crate) fn try_lock(
        &mut self,
        keys: &[i64],
        fences: &[i64],
        idle_timeout: Option<&str>,
    ) -> Result<Granted, Error> {
        let sql = statements::TRY_LOCK;
        let rows = self.query(sql, &[&keys, &fences, &idle_timeout])?;
        let row = one(sql, &rows)?;
        let Some(keys) = get::<Option<Vec<i64>>>(sql, row, 0)? else {
            return Ok(Granted::default());
        };
        let xid = get::<String>(sql, row, 1)?.parse().map_err(|_| Error::Protocol(sql.name))?;
        let timeline = timeline(sql, Some(get(sql, row, 2)?))?;
        let token = FencingToken::new(timeline, xid).ok_or(Error::TokenExhausted)?;
        let fenced = get::<Vec<i64>>(sql, row, 4)?.into_iter().collect();
        Ok(Granted { keys: keys.into_iter().collect(), fenced, token: Some(token) })
    }

    /// Which of `fences` are still busy, and by which backends.
    pub(crate) fn busy_fences(&mut self, fences: &[i64]) -> Result<Vec<(i64, Vec<i32>)>, Error> {
        let sql = statements::TRY_FENCES;
        let database = self.facts.database;
        let rows = self.query(sql, &[&fences, &database])?;
        rows.iter().map(|row| Ok((get(sql, row, 0)?, get(sql, row, 1)?))).collect()
    }

    /// Sends a message to every session that listens.
    pub(crate) fn notify(&mut self, message: &str) -> Result<(), Error> {
        self.query(statements::NOTIFY, &[&message]).map(drop)
    }

    /// Ends the backends `pids`.
    pub(crate) fn terminate(&mut self, pids: &[i32]) -> Result<(), Error> {
        self.query(statements::TERMINATE, &[&pids]).map(drop)
    }

    /// Which sessions hold `keys`: key, pid, and the session's beacon if it has one.
    pub(crate) fn holders(&mut self, keys: &[i64]) -> Result<Vec<(i64, i32, Option<i32>)>, Error> {
        let sql = statements::HOLDERS;
        let (database, class) = (self.facts.database, BEACON_CLASS.unsigned_abs());
        let rows = self.query(sql, &[&keys, &database, &class])?;
        rows.iter()
            .map(|row| {
                let beacon: Option<u32> = get(sql, row, 2)?;
                let beacon = beacon.map(|half| i32::from_ne_bytes(half.to_ne_bytes()));
                Ok((get(sql, row, 0)?, get(sql, row, 1)?, beacon))
            })
            .collect()
    }

    /// Waits until the session with this beacon has ended; false if it had not within the session's
    /// `lock_timeout`.
    pub(crate) fn watch(&mut self, beacon: i32) -> Result<bool, Error> {
        let outcome = self.query(statements::WATCH, &[&BEACON_CLASS, &beacon]);
        // After an error the lock may be held all the same; it is on no account kept.
        let timed_out = match &outcome {
            Ok(_) => false,
            Err(error) if error.sqlstate() == Some(&SqlState::LOCK_NOT_AVAILABLE) => true,
            Err(_) => return outcome.map(|_| false),
        };
        self.query(statements::UNWATCH, &[&BEACON_CLASS, &beacon])?;
        Ok(!timed_out)
    }

    /// Unlocks `keys` and tells the standbys; gives the keys that were not held.
    pub(crate) fn unlock(
        &mut self,
        keys: &[i64],
        idle_timeout: Option<&str>,
    ) -> Result<Vec<i64>, Error> {
        let rows = self.query(statements::UNLOCK, &[&keys, &idle_timeout])?;
        not_held(statements::UNLOCK, &rows)
    }

    /// Unlocks `keys` and tells nobody; gives the keys that were not held.
    pub(crate) fn unlock_quietly(&mut self, keys: &[i64]) -> Result<Vec<i64>, Error> {
        let rows = self.query(statements::UNLOCK_QUIETLY, &[&keys])?;
        not_held(statements::UNLOCK_QUIETLY, &rows)
    }

    /// Which of `keys` this session holds.
    pub(crate) fn ask(&mut self, keys: &[i64]) -> Result<Vec<i64>, Error> {
        let database = self.facts.database;
        let rows = self.query(statements::ASK, &[&keys, &database])?;
        rows.iter().map(|row| get(statements::ASK, row, 0)).collect()
    }

    /// Proves that this session holds `keys` and is what it was.
    pub(crate) fn heartbeat(&mut self, keys: &[i64]) -> Result<Pulse, Error> {
        let sql = statements::HEARTBEAT;
        let database = self.facts.database;
        let rows = self.query(sql, &[&keys, &database])?;
        let row = one(sql, &rows)?;
        Ok(Pulse {
            pid: get(sql, row, 0)?,
            standby: get(sql, row, 1)?,
            timeline: timeline(sql, get(sql, row, 2)?)?,
            missing: get(sql, row, 3)?,
        })
    }

    /// Who holds `key`.
    pub(crate) fn holder(&mut self, key: i64) -> Result<Option<HolderRow>, Error> {
        let sql = statements::HOLDER;
        let bytes = key.to_be_bytes();
        let [a, b, c, d, e, f, g, h] = bytes;
        let classid = u32::from_be_bytes([a, b, c, d]);
        let objid = u32::from_be_bytes([e, f, g, h]);
        let database = self.facts.database;
        let rows = self.query(sql, &[&classid, &objid, &database])?;
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(HolderRow {
            pid: get(sql, row, 0)?,
            application_name: get(sql, row, 1)?,
            client_addr: get(sql, row, 2)?,
            backend_start: get(sql, row, 3)?,
        }))
    }

    /// Waits for messages on the channel of releases, at most for `limit`; ends early when the
    /// guard is woken. An error or [`Session::is_broken`] means that the server ended the session:
    /// seen within milliseconds, without a statement.
    pub(crate) fn park(&mut self, limit: Duration) -> Result<Vec<String>, Error> {
        let sql = statements::LISTEN;
        let mut heard = Vec::new();
        let mut hear = |notification: postgres::Notification| {
            if notification.channel() == statements::CHANNEL {
                heard.push(notification.payload().to_owned());
            }
            notification.channel() == WAKE_CHANNEL
        };
        let mut notifications = self.client.notifications();
        let result = (|| {
            if let Some(first) = notifications.timeout_iter(limit).next()? {
                hear(first);
            }
            let mut pending = notifications.iter();
            while let Some(next) = pending.next()? {
                hear(next);
            }
            Ok(())
        })();
        drop(notifications);
        result.map_err(|source| {
            self.failed(&source);
            Error::Query { statement: sql.name, source: Arc::new(source) }
        })?;
        Ok(heard)
    }

    /// Ends the session in good order; bounded, and quick on a server that answers.
    pub(crate) fn close(self) {
        match &self.guard {
            Some(guard) => {
                guard.arm(Instant::now() + CLOSE_BOUND.min(self.query_timeout));
                drop(self.client);
            }
            None => self.abandon(),
        }
    }

    /// Lets go of a session that is lost, without waiting for the server.
    pub(crate) fn abandon(self) {
        let client = self.client;
        match &self.guard {
            Some(guard) => {
                guard.kill();
                drop(client);
            }
            // Dropping waits for the server, and nothing can cut that short over a Unix socket.
            None => {
                let name = "leasehold-close".into();
                if let Err(error) = thread::Builder::new().name(name).spawn(move || drop(client)) {
                    log::error!(target: "leasehold", "cannot start a thread to close a session: {error}");
                }
            }
        }
    }
}

fn one(sql: Sql, rows: &[Row]) -> Result<&Row, Error> {
    rows.first().ok_or(Error::Protocol(sql.name))
}

/// A column's value; the type is the statement's to know, so a mismatch is not from our server.
fn get<'a, T: postgres::types::FromSql<'a>>(
    sql: Sql,
    row: &'a Row,
    column: usize,
) -> Result<T, Error> {
    row.try_get(column)
        .map_err(|source| Error::Query { statement: sql.name, source: Arc::new(source) })
}

/// Keys whose unlock the server answered with false.
fn not_held(sql: Sql, rows: &[Row]) -> Result<Vec<i64>, Error> {
    let mut missing = Vec::new();
    for row in rows {
        if !get::<bool>(sql, row, 1)? {
            missing.push(get(sql, row, 0)?);
        }
    }
    Ok(missing)
}

/// A timeline from the first 8 digits of a WAL file's name; 0 on a standby, which has none to tell.
fn timeline(sql: Sql, digits: Option<String>) -> Result<u32, Error> {
    digits.map_or(Ok(0), |digits| {
        u32::from_str_radix(&digits, 16).map_err(|_| Error::Protocol(sql.name))
    })
}
