//! Sessions for module `lock`: a pool of guarded ones, or the clients of a pool that the user has.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use postgres::config::{Host, SslMode};
use postgres::fallible_iterator::FallibleIterator;
use postgres::tls::{MakeTlsConnect, TlsConnect};
use postgres::{CancelToken, Client, Config, NoTls, Socket};
use scheduled_thread_pool::ScheduledThreadPool;

use super::Session;
use super::connect::{Connector, SessionOptions};
use super::patient::Patient;
use super::pinned::Pinned;
use super::shelf::{KEPT, Shelf};
use super::tls::{Guarded, Security};
use crate::error::{Error, Timeout};

/// Bounds r2d2's wait between two attempts to connect: half of this.
const POOL_BACKOFF: Duration = Duration::from_secs(2);
/// A wait for a connection looks this often whether it should go on. r2d2 does not wake a waiter
/// when a broken connection makes room for a new one.
const SLICE: Duration = Duration::from_millis(50);
/// How long a session is looked at: the timer counts milliseconds. With less the driver would not
/// look at the socket at all.
const GLANCE: Duration = Duration::from_millis(1);
/// A session that was in use within this is not looked at before it is used again.
const TRUSTED: Duration = Duration::from_millis(20);
/// Threads that connect, and close what is old.
const POOL_THREADS: usize = 2;

/// Sends a cancel request for what a session does at the moment.
pub(crate) type Cancel = Arc<dyn Fn(&CancelToken) -> Result<(), postgres::Error> + Send + Sync>;

/// What asking for a session came to.
pub(crate) enum Got {
    Session(Pinned),
    /// All are in use.
    Busy,
    Failed(Error),
}

/// Where sessions come from.
pub(crate) trait Source: Send + Sync {
    /// Waits for a session for at most `wait`, `None` for as long as it takes or until `stop` says
    /// so. An endpoint that cannot be connected to ends the wait in any case, after `patience`.
    fn get(&self, wait: Option<Duration>, patience: Duration, stop: &dyn Fn() -> bool) -> Got;
    /// The most sessions there can be.
    fn size(&self) -> u32;
    /// True if every session is guarded and was proved when it was opened.
    fn is_guarded(&self) -> bool;
}

/// A pooled session; what r2d2 drops is closed in good order, or cut if it is broken.
pub(crate) struct PooledSession {
    session: Option<Box<Session>>,
    poisoned: bool,
    /// When it was given back.
    used: Option<Instant>,
}

impl PooledSession {
    pub(crate) fn session(&mut self) -> Option<&mut Session> {
        self.session.as_deref_mut()
    }

    /// Notices that the server ended the session; spares one that was in use a moment ago.
    fn look(&mut self) -> Result<(), Error> {
        if self.used.is_some_and(|used| used.elapsed() < TRUSTED) {
            return Ok(());
        }
        self.session.as_deref_mut().map_or(Err(Error::NotHeld), Session::look)
    }

    /// False if the server is known to have ended the session.
    pub(crate) fn is_usable(&mut self) -> bool {
        self.look().is_ok()
    }

    /// Remembers that the session was in use until now. False if it is of no use any more.
    pub(crate) fn rest(&mut self) -> bool {
        self.used = Some(Instant::now());
        !self.poisoned && self.session.as_deref().is_some_and(|session| !session.is_broken())
    }

    /// True if its statements end by themselves.
    pub(crate) fn is_guarded(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.guard.is_some())
    }

    /// Keeps the pool from using the session again.
    pub(crate) fn poison(&mut self) {
        self.poisoned = true;
    }
}

impl Drop for PooledSession {
    fn drop(&mut self) {
        match self.session.take() {
            Some(session) if self.poisoned || session.is_broken() => session.abandon(),
            Some(session) => session.close(),
            None => {}
        }
    }
}

/// Which sessions a pool opens.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// Proved to keep session locks, and set up for it.
    Session,
    /// Good for transactions only: nothing is set that outlives one.
    Transaction,
}

type Open = Box<dyn Fn() -> Result<Session, Error> + Send + Sync>;

/// Opens guarded sessions for r2d2.
pub(crate) struct SessionManager {
    open: Open,
    /// Why the last attempt failed, with its type: r2d2 keeps a text only.
    failed: Mutex<Option<Error>>,
}

impl SessionManager {
    fn failed(&self) -> std::sync::MutexGuard<'_, Option<Error>> {
        self.failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// r2d2 wants a manager it owns, and we want to read its last error.
pub(crate) struct Manager(Arc<SessionManager>);

impl r2d2::ManageConnection for Manager {
    type Connection = PooledSession;
    type Error = Error;

    fn connect(&self) -> Result<PooledSession, Error> {
        let opened = (self.0.open)();
        *self.0.failed() = opened.as_ref().err().cloned();
        opened.map(|session| PooledSession {
            session: Some(Box::new(session)),
            poisoned: false,
            used: None,
        })
    }

    fn is_valid(&self, pooled: &mut PooledSession) -> Result<(), Error> {
        pooled.look()
    }

    fn has_broken(&self, pooled: &mut PooledSession) -> bool {
        !pooled.rest()
    }
}

#[derive(Debug)]
struct LogConnectErrors;

impl r2d2::HandleError<Error> for LogConnectErrors {
    fn handle_error(&self, error: Error) {
        log::warn!(target: "leasehold", "no pooled session: {}", error.chain());
    }
}

impl Session {
    /// Notices that the server ended the session, without a round trip; takes 1 to 2 ms.
    fn look(&mut self) -> Result<(), Error> {
        let drained = self.client.notifications().timeout_iter(GLANCE).count();
        drained.map_err(|source| super::pinned::query_error("look", source))?;
        if self.is_broken() { Err(Error::NotHeld) } else { Ok(()) }
    }

    /// The client, for one exchange that must be over by `deadline`; without one it takes as long
    /// as it takes, or until the guard is killed.
    pub(super) fn exchange<R>(
        &mut self,
        statement: &'static str,
        deadline: Option<Instant>,
        work: impl FnOnce(&mut Client) -> Result<R, postgres::Error>,
    ) -> Result<R, Error> {
        let start = Instant::now();
        if let (Some(guard), Some(deadline)) = (&self.guard, deadline) {
            guard.arm(deadline);
        }
        let result = work(&mut self.client);
        let dead = self.guard.as_ref().is_some_and(|guard| {
            guard.disarm();
            guard.is_dead()
        });
        match result {
            Err(_) if dead => Err(Error::Timeout(Timeout::Query(statement, start.elapsed()))),
            result => result.map_err(|source| super::pinned::query_error(statement, source)),
        }
    }

    /// Prepares once for each session.
    pub(super) fn prepared(
        &mut self,
        sql: super::Sql,
        params: &[&(dyn postgres::types::ToSql + Sync)],
    ) -> Result<Vec<postgres::Row>, Error> {
        self.query(sql, params)
    }
}

/// A pool of guarded sessions.
pub(crate) struct GuardedPool {
    /// Dropped before the pool into which it empties itself.
    shelf: Arc<Shelf>,
    pool: r2d2::Pool<Manager>,
    manager: Arc<SessionManager>,
    query_timeout: Duration,
    guarded: bool,
}

impl GuardedPool {
    /// A pool that opens sessions when they are asked for. Does not connect.
    pub(crate) fn new<T>(
        config: &Config,
        tls: T,
        plain: bool,
        options: SessionOptions,
        size: u32,
        proof: Proof,
    ) -> (GuardedPool, Cancel)
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send,
        T::Stream: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let mode = match (plain, config.get_ssl_mode()) {
            (true, mode) if mode != SslMode::Require => SslMode::Disable,
            (_, mode) => mode,
        };
        let security = Security { mode, negotiation: config.get_ssl_negotiation() };
        let query_timeout = options.query_timeout;
        let guarded = !config.get_hosts().iter().any(|host| matches!(host, Host::Unix(_)));
        let connector = match plain {
            true => Connector::plain(config, options),
            false => Connector::with_tls(config, tls.clone(), options),
        };
        let open: Open = Box::new(move || match proof {
            Proof::Session => connector.open().map(|(session, _)| session),
            Proof::Transaction => open_unproved(&connector),
        });
        let cancel: Cancel = match guarded {
            true => Arc::new(move |token| {
                let guard = Arc::default();
                let tls = tls.clone();
                token.cancel_query(Patient(Guarded { tls, security, budget: query_timeout, guard }))
            }),
            false => Arc::new(|token| token.cancel_query(NoTls)),
        };
        let manager = Arc::new(SessionManager { open, failed: Mutex::new(None) });
        let threads = ScheduledThreadPool::builder()
            .num_threads(POOL_THREADS)
            .thread_name_pattern("leasehold-pool-{}")
            .build();
        let shelf = Arc::<Shelf>::default();
        let weak = Arc::downgrade(&shelf);
        threads.execute_at_fixed_rate(KEPT, KEPT, move || {
            if let Some(shelf) = weak.upgrade() {
                shelf.clear_old();
            }
        });
        let pool = r2d2::Pool::builder()
            .max_size(size)
            .min_idle(Some(0))
            .connection_timeout(POOL_BACKOFF)
            .thread_pool(Arc::new(threads))
            .error_handler(Box::new(LogConnectErrors))
            .build_unchecked(Manager(Arc::clone(&manager)));
        (GuardedPool { shelf, pool, manager, query_timeout, guarded }, cancel)
    }
}

/// Opens a session that holds nothing and has no settings of ours; see [`Proof::Transaction`].
fn open_unproved(connector: &Connector) -> Result<Session, Error> {
    let end_by = Instant::now() + connector.options.query_timeout;
    let mut session = connector.hello(end_by)?;
    session.end_by(None);
    Ok(session)
}

/// Asks `pool` in slices until one of them, the wait, `stop` or `give_up` ends it.
pub(super) fn wait_for<M: r2d2::ManageConnection>(
    pool: &r2d2::Pool<M>,
    (wait, patience): (Option<Duration>, Duration),
    stop: &dyn Fn() -> bool,
    failure: &dyn Fn(r2d2::Error) -> Option<Error>,
) -> Result<r2d2::PooledConnection<M>, Option<Error>> {
    let start = Instant::now();
    let mut failed = None;
    loop {
        let left = wait.map_or(SLICE, |wait| wait.saturating_sub(start.elapsed()));
        match pool.get_timeout(left.min(SLICE)) {
            Ok(connection) => return Ok(connection),
            Err(error) => failed = failure(error).or(failed),
        }
        let over = wait.is_some_and(|wait| start.elapsed() >= wait);
        let hopeless = failed.as_ref().is_some_and(|error| !error.is_retryable());
        let tired = failed.is_some() && start.elapsed() >= patience;
        if over || hopeless || tired || stop() {
            return Err(failed);
        }
    }
}

impl Source for GuardedPool {
    fn get(&self, wait: Option<Duration>, patience: Duration, stop: &dyn Fn() -> bool) -> Got {
        let pinned =
            |connection| Got::Session(Pinned::guarded(connection, self.query_timeout, &self.shelf));
        if let Some(connection) = self.shelf.take_own().or_else(|| self.pool.try_get()) {
            return pinned(connection);
        }
        let _waiting = self.shelf.wait();
        if let Some(connection) = self.shelf.take_any() {
            return pinned(connection);
        }
        // An old failure says nothing about this wait.
        self.manager.failed().take();
        let failure = |_| self.manager.failed().clone();
        match wait_for(&self.pool, (wait, patience), stop, &failure) {
            Ok(connection) => pinned(connection),
            Err(None) => Got::Busy,
            Err(Some(error)) => Got::Failed(error),
        }
    }

    fn size(&self) -> u32 {
        self.pool.max_size()
    }

    fn is_guarded(&self) -> bool {
        self.guarded
    }
}

impl fmt::Debug for dyn Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("size", &self.size()).finish_non_exhaustive()
    }
}
