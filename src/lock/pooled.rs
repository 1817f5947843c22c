//! Locks with a time to live, each on a pooled session of its own.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use postgres::tls::{MakeTlsConnect, TlsConnect};
use postgres::{Config, NoTls, Socket};
use r2d2_postgres::PostgresConnectionManager;

use crate::backoff::Backoff;
use crate::error::Error;
use crate::event::LockEvent;
use crate::lock::config::{LockConfig, check_ttl};
use crate::lock::core::{Core, Named};
use crate::lock::handle::{Grant, Held, Lock, idle_limit};
use crate::session::foreign::UserPool;
use crate::session::pool::{GuardedPool, Proof, Source};

/// Between two tries of [`PooledLocker::acquire_timeout`]: the first wait, and the longest.
const WAITS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));

/// The locks that are out.
#[derive(Default)]
pub(crate) struct Registry {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    closed: bool,
    next: u64,
    held: HashMap<u64, Weak<Held>>,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn forget(&self, id: u64) {
        self.lock().held.remove(&id);
    }

    /// Makes a lock of a grant, unless the locker was closed in the meantime.
    fn admit(self: &Arc<Registry>, core: &Arc<Core>, grant: Grant) -> Result<Lock, Error> {
        let mut state = self.lock();
        if state.closed {
            // Ends the session, and with it the lock.
            return Err(Error::Closed);
        }
        let id = state.next;
        state.next += 1;
        let held = Arc::new(Held::new(core, Arc::downgrade(self), id, grant));
        state.held.insert(id, Arc::downgrade(&held));
        Ok(Lock { held })
    }
}

/// Hands out locks with a time to live, each on a pooled session of its own.
///
/// Clones are the same locker. [`Lock`]s outlive it.
///
/// # The TTL
///
/// From PostgreSQL 14 on *the server* ends the session of a lock that was not refreshed within its
/// TTL (`idle_session_timeout`): a holder that ignores the expiry, or is stopped, or lost its
/// machine or its network, loses the lock, and another can acquire it. The holder's own clock
/// passes first. PostgreSQL 13 has no such setting: there a lapsed lock stays until its holder
/// releases it or its session ends, for a vanished host by TCP keepalives; PostgreSQL 12 is not
/// supported. [`LockConfig::enforce_ttl`] turns it off.
///
/// # Threads
///
/// All methods may be called inside an async runtime: what blocks is then done by threads named
/// `leasehold-lock` while the caller waits, and so it always is on a pool of the user's. Otherwise the
/// caller's thread does it. Connecting is always done by threads of the pool.
///
/// # How long calls block
///
/// A call that needs a connection blocks for at most
/// [`conn_wait_timeout`](LockConfig::conn_wait_timeout), for as long as it takes if that is `None`,
/// and then for at most the [query time-out](LockConfig::query_timeout). The first one on a pool of
/// the user's proves it too: at most twice the former and three times the latter.
///
/// # Examples
///
/// ```no_run
/// use std::time::Duration;
/// use leasehold::lock::{LockConfig, PooledLocker};
///
/// let config = "postgres://app@db.example.com/app".parse()?;
/// let locker = PooledLocker::new(config, LockConfig::new())?;
/// if let Some(lock) = locker.try_acquire("report-7", Duration::from_secs(30))? {
///     // Work, and `lock.refresh(..)` if it takes long.
///     lock.release()?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PooledLocker {
    inner: Arc<Inner>,
}

struct Inner {
    core: Arc<Core>,
    registry: Arc<Registry>,
}

impl PooledLocker {
    /// A locker on a pool of its own, without TLS. Does not connect.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for options that cannot work, [`Error::Spawn`] if a thread cannot
    /// be started.
    pub fn new(config: Config, options: LockConfig) -> Result<PooledLocker, Error> {
        options.validate()?;
        let (session, size) = (options.session_options(), options.pool_size);
        let (pool, _) = GuardedPool::new(&config, NoTls, true, session, size, Proof::Session);
        PooledLocker::from_source(Arc::new(pool), options)
    }

    /// A locker on a pool of its own, with the user's TLS as `sslmode` says. Does not connect.
    ///
    /// # Errors
    ///
    /// As [`new`](PooledLocker::new).
    pub fn with_tls<T>(config: Config, tls: T, options: LockConfig) -> Result<PooledLocker, Error>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send,
        T::Stream: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        options.validate()?;
        let (session, size) = (options.session_options(), options.pool_size);
        let (pool, _) = GuardedPool::new(&config, tls, false, session, size, Proof::Session);
        PooledLocker::from_source(Arc::new(pool), options)
    }

    /// A locker on a pool that the user has, of `r2d2` 0.8 and `r2d2_postgres` 0.18, and goes on
    /// using. Does not connect.
    ///
    /// A lock takes one connection out of the pool until it is released; other advisory locks on
    /// it, and its settings, are left as they are. The pool's connections have no bound of their
    /// own, so they are used on threads of the library, and a caller whose statement is not
    /// answered within the query time-out gives its lock up. Before the first lock two connections
    /// of the pool prove that the endpoint keeps sessions apart; a pool of one is trusted until it
    /// is caught.
    ///
    /// # Errors
    ///
    /// As [`new`](PooledLocker::new).
    pub fn from_pool<T>(
        pool: r2d2::Pool<PostgresConnectionManager<T>>,
        options: LockConfig,
    ) -> Result<PooledLocker, Error>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send,
        T::Stream: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        PooledLocker::from_source(Arc::new(UserPool { pool }), options)
    }

    fn from_source(source: Arc<dyn Source>, options: LockConfig) -> Result<PooledLocker, Error> {
        let core = Core::new(options, source)?;
        Ok(PooledLocker { inner: Arc::new(Inner { core, registry: Arc::default() }) })
    }

    /// Acquires the lock `key` for `ttl`, or says why not. Asks once, never waits for the lock.
    ///
    /// Checked in this order: the key, the TTL, whether the locker is closed, the circuit breaker;
    /// then a connection is taken, and the lock tried.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyName`]; [`Error::InvalidTtl`] for zero or more than 2^31 - 1 ms, almost 25 days;
    /// [`Error::Forked`]; [`Error::Closed`]; [`Error::CircuitOpen`]; [`Error::NotAcquired`] if it is
    /// held elsewhere, in this process or another, or if no connection was free within
    /// `conn_wait_timeout`; the error of the pool or of the statement otherwise, after which the lock
    /// is *not* held. For how long it blocks, see [above](PooledLocker#how-long-calls-block).
    pub fn acquire(&self, key: &str, ttl: Duration) -> Result<Lock, Error> {
        self.ask(key, ttl, false, None)
    }

    /// [`acquire`](PooledLocker::acquire) in shared mode: any number of shared holders, or one
    /// exclusive one.
    ///
    /// # Errors
    ///
    /// As [`acquire`](PooledLocker::acquire).
    pub fn acquire_shared(&self, key: &str, ttl: Duration) -> Result<Lock, Error> {
        self.ask(key, ttl, true, None)
    }

    /// [`acquire`](PooledLocker::acquire) with contention as an outcome: `None`.
    ///
    /// # Errors
    ///
    /// As [`acquire`](PooledLocker::acquire), without [`Error::NotAcquired`].
    pub fn try_acquire(&self, key: &str, ttl: Duration) -> Result<Option<Lock>, Error> {
        contended(self.acquire(key, ttl))
    }

    /// [`try_acquire`](PooledLocker::try_acquire) in shared mode.
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](PooledLocker::try_acquire).
    pub fn try_acquire_shared(&self, key: &str, ttl: Duration) -> Result<Option<Lock>, Error> {
        contended(self.acquire_shared(key, ttl))
    }

    /// Tries again, with jittered waits of 5 to 300 ms, until the lock is acquired or `timeout` has
    /// passed: `None`. Between two tries no connection is in use, and nothing waits in the server.
    ///
    /// A try waits for a connection for what is left of `timeout` at most: if that is too short to
    /// connect, `None`. One that has a connection is finished: it can take longer than `timeout` by
    /// the query time-out, and by three times that the first time that a user's pool is used.
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](PooledLocker::try_acquire): other errors than contention are not retried.
    pub fn acquire_timeout(
        &self,
        key: &str,
        ttl: Duration,
        timeout: Duration,
    ) -> Result<Option<Lock>, Error> {
        self.ask_until(key, ttl, timeout, false)
    }

    /// [`acquire_timeout`](PooledLocker::acquire_timeout) in shared mode.
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](PooledLocker::try_acquire).
    pub fn acquire_shared_timeout(
        &self,
        key: &str,
        ttl: Duration,
        timeout: Duration,
    ) -> Result<Option<Lock>, Error> {
        self.ask_until(key, ttl, timeout, true)
    }

    /// Proves that a session can be had and is answered, on an endpoint that can hold locks.
    ///
    /// # Errors
    ///
    /// As [`acquire`](PooledLocker::acquire), of which it has the bound: [`Error::NotAcquired`] says
    /// that no connection was free.
    pub fn ping(&self) -> Result<(), Error> {
        let core = Arc::clone(&self.inner.core);
        core.admit()?;
        let result = core.run(core.bound(3), None, {
            let core = Arc::clone(&core);
            move || {
                let mut session = core
                    .checkout(core.config.conn_wait_timeout, &|| false)?
                    .ok_or(Error::NotAcquired)?;
                session.ping()?;
                session.give_back();
                Ok(())
            }
        });
        let result = result.and_then(|result| result);
        core.report(&result);
        result
    }

    /// Releases every lock that is out and closes the idle sessions; from then on `acquire` is
    /// [`Error::Closed`]. A pool of the user's stays open. A second call does nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] in a forked child: it touches nothing. The first error of a release; all are
    /// tried. Blocks for at most the query time-out, however many locks there are: a session that
    /// was not unlocked by then is ended.
    pub fn close(&self) -> Result<(), Error> {
        let Inner { core, registry } = &*self.inner;
        if core.is_forked() {
            return Err(Error::Forked);
        }
        let held: Vec<_> = {
            let mut state = registry.lock();
            state.closed = true;
            state.held.drain().filter_map(|(_, held)| held.upgrade()).collect()
        };
        core.close();
        if held.is_empty() {
            return Ok(());
        }
        let bound = core.config.query_timeout;
        let result = core.run(Some(core.statement_bound()), None, move || {
            let end_by = Instant::now() + bound;
            let mut first = Ok(());
            for each in held {
                first = first.and(each.unlock(Some(end_by)));
            }
            first
        });
        result.and_then(|result| result)
    }

    /// Asks once; `left` is how long the caller still has.
    fn ask(
        &self,
        key: &str,
        ttl: Duration,
        shared: bool,
        left: Option<Duration>,
    ) -> Result<Lock, Error> {
        if key.is_empty() {
            return Err(Error::EmptyName);
        }
        check_ttl(ttl)?;
        let Inner { core, registry } = &*self.inner;
        core.admit()?;
        let named = core.named(key);
        let wait = core.conn_wait(left);
        let all = (Arc::clone(core), Arc::clone(registry), named.clone());
        let result = core.run(core.bound_with(wait, 3), None, move || {
            take(&all.0, &all.1, all.2, (ttl, shared), wait)
        });
        let result = result.and_then(|result| result);
        core.report(&result);
        let event = match &result {
            Ok(lock) => LockEvent::Acquired { pid: lock.held.pid, shared, ttl: Some(ttl) },
            Err(Error::NotAcquired) => LockEvent::Contended,
            Err(error) => LockEvent::Failed { error: error.clone() },
        };
        core.tell(&named, event);
        result
    }

    fn ask_until(
        &self,
        key: &str,
        ttl: Duration,
        timeout: Duration,
        shared: bool,
    ) -> Result<Option<Lock>, Error> {
        let end = Instant::now().checked_add(timeout);
        let left = || end.map(|end| end.saturating_duration_since(Instant::now()));
        let mut waits = Backoff::new(WAITS.0, WAITS.1, fastrand::Rng::new());
        loop {
            if let Some(lock) = contended(self.ask(key, ttl, shared, left()))? {
                return Ok(Some(lock));
            }
            match left().unwrap_or(Duration::MAX) {
                Duration::ZERO => return Ok(None),
                left => std::thread::sleep(waits.next().min(left)),
            }
        }
    }
}

fn contended(result: Result<Lock, Error>) -> Result<Option<Lock>, Error> {
    match result {
        Err(Error::NotAcquired) => Ok(None),
        result => result.map(Some),
    }
}

/// The part of `acquire` that talks to the server. On any error the session ends with it.
fn take(
    core: &Arc<Core>,
    registry: &Arc<Registry>,
    named: Named,
    (ttl, shared): (Duration, bool),
    wait: Option<Duration>,
) -> Result<Lock, Error> {
    let Some(mut session) = core.checkout(wait, &|| core.is_closed())? else {
        return Err(Error::NotAcquired);
    };
    let idle = idle_limit(core, ttl);
    let start = core.clock.now();
    let attempt = session.try_lock(named.key.as_i64(), shared, idle.as_deref())?;
    if !attempt.granted {
        session.give_back();
        return Err(Error::NotAcquired);
    }
    let (pid, former_idle) = (attempt.pid, attempt.idle);
    let grant = Grant { named, shared, pid, former_idle, ttl, start, session };
    registry.admit(core, grant)
}

impl fmt::Debug for PooledLocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PooledLocker")
            .field("config", &self.inner.core.config)
            .field("held", &self.inner.registry.lock().held.len())
            .finish_non_exhaustive()
    }
}
