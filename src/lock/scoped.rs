//! Locks that live exactly as long as a closure, in a transaction of their own.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::bounded;
use postgres::tls::{MakeTlsConnect, TlsConnect};
use postgres::{Config, NoTls, Socket};
use r2d2_postgres::PostgresConnectionManager;

use crate::cancel::CancellationToken;
use crate::error::Error;
use crate::event::LockEvent;
use crate::lock::ScopeError;
use crate::lock::config::LockConfig;
use crate::lock::core::{Core, Named};
use crate::lock::scope::{Scope, Wish, enter};
use crate::session::foreign::UserPool;
use crate::session::pool::{Cancel, GuardedPool, Proof, Source};

/// Runs closures under a lock that lives exactly as long as the closure.
///
/// Clones are the same locker.
///
/// # The transaction
///
/// The lock belongs to a transaction of its own, on a pooled session: `READ COMMITTED`, read only,
/// without a snapshot while the closure runs, so that it holds back neither vacuum nor
/// `CREATE INDEX CONCURRENTLY`. It is not for the closure's use. It sets its own limits, so that
/// `idle_in_transaction_session_timeout`, `transaction_timeout`, `statement_timeout` and
/// `lock_timeout` of the server's configuration do not end it; [`LockConfig::max_hold`] sets one.
///
/// The lock goes with the transaction, so this works through a transaction pooler (PgBouncer with
/// `pool_mode = transaction`), which the other locks of this crate refuse.
///
/// # Waiting
///
/// Waiters queue in the server and are granted in the order of their requests. **A waiter has a
/// snapshot while it queues**: a long wait holds back vacuum, and a `CREATE INDEX CONCURRENTLY`
/// waits for it. [`LockConfig::max_wait`] bounds it; [`LockConfig::wait_slice`] gives the snapshot
/// up in between, and with it the order. A cancelled waiter leaves the server's queue.
///
/// Each waiter and each holder takes a connection of the pool: closures that take further locks
/// on the same locker can use the pool up.
///
/// # Examples
///
/// ```no_run
/// use leasehold::CancellationToken;
/// use leasehold::lock::{LockConfig, ScopedLocker};
///
/// let config = "postgres://app@db.example.com/app".parse()?;
/// let locks = ScopedLocker::new(config, LockConfig::new())?;
/// let cancel = CancellationToken::new();
/// locks.with_lock(&cancel, "rebuild", || std::fs::write("index", "rebuilt"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ScopedLocker {
    core: Arc<Core>,
    send_cancel: Cancel,
}

impl ScopedLocker {
    /// A locker on a pool of its own, without TLS. Does not connect.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for options that cannot work, [`Error::Spawn`] if a thread cannot
    /// be started.
    pub fn new(config: Config, options: LockConfig) -> Result<ScopedLocker, Error> {
        options.validate()?;
        let (session, size) = (options.session_options(), options.pool_size);
        let (pool, cancel) =
            GuardedPool::new(&config, NoTls, true, session, size, Proof::Transaction);
        ScopedLocker::from_source(Arc::new(pool), cancel, options)
    }

    /// A locker on a pool of its own, with the user's TLS as `sslmode` says. Does not connect.
    ///
    /// # Errors
    ///
    /// As [`new`](ScopedLocker::new).
    pub fn with_tls<T>(config: Config, tls: T, options: LockConfig) -> Result<ScopedLocker, Error>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send,
        T::Stream: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        options.validate()?;
        let (session, size) = (options.session_options(), options.pool_size);
        let (pool, cancel) =
            GuardedPool::new(&config, tls, false, session, size, Proof::Transaction);
        ScopedLocker::from_source(Arc::new(pool), cancel, options)
    }

    /// A locker on a pool that the user has, of `r2d2` 0.8 and `r2d2_postgres` 0.18, and goes on
    /// using; `tls` is for cancel requests, which go over connections of their own. Does not connect.
    ///
    /// The pool's connections have no bound of their own, so they are used on threads of the
    /// library. Its cancel requests are the driver's, which PgBouncer 1.18 does not survive: behind
    /// it, use [`new`](ScopedLocker::new).
    ///
    /// # Errors
    ///
    /// As [`new`](ScopedLocker::new).
    pub fn from_pool<T>(
        pool: r2d2::Pool<PostgresConnectionManager<T>>,
        tls: T,
        options: LockConfig,
    ) -> Result<ScopedLocker, Error>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::TlsConnect: Send,
        T::Stream: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let cancel: Cancel = Arc::new(move |token| token.cancel_query(tls.clone()));
        ScopedLocker::from_source(Arc::new(UserPool { pool }), cancel, options)
    }

    fn from_source(
        source: Arc<dyn Source>,
        send_cancel: Cancel,
        options: LockConfig,
    ) -> Result<ScopedLocker, Error> {
        Ok(ScopedLocker { core: Core::new(options, source)?, send_cancel })
    }

    /// Waits for the lock `key`, in order, runs `f` on the calling thread, and commits: that
    /// releases the lock. If `f` fails or panics the transaction is rolled back, which releases it
    /// as well, and the error is returned as it is, or the panic goes on.
    ///
    /// # Errors
    ///
    /// [`ScopeError::Job`] with the error of `f`. [`ScopeError::Lock`] with
    /// [`Error::EmptyName`], [`Error::Forked`], [`Error::Closed`], [`Error::CircuitOpen`];
    /// [`Error::Cancelled`] if `cancel` was set before `f` ran; [`Error::NotAcquired`] if no connection was free within
    /// `conn_wait_timeout`, or the lock not within `max_wait`; the error of the pool or of the
    /// statement: in all of these `f` did not run. [`Error::Lost`]: `f` ran and succeeded, but the
    /// lock was lost before it returned, or may have been. [`ScopeError::Both`]: so it was, and `f` failed.
    ///
    /// Blocks until the lock is granted; after `cancel` is set, for a few milliseconds if the server
    /// answers, and for the query time-out if it does not (on a pool of the user's, and inside an
    /// async runtime, for at most twice that and 2 s). After `f` it blocks for at most the query
    /// time-out.
    ///
    /// # Panics
    ///
    /// With the panic of `f`, after the release.
    pub fn with_lock<T, E, F>(
        &self,
        cancel: &CancellationToken,
        key: &str,
        f: F,
    ) -> Result<T, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>,
    {
        self.hold(cancel, key, (true, false), f)?.ok_or(ScopeError::Lock(Error::NotAcquired))
    }

    /// [`with_lock`](ScopedLocker::with_lock) in shared mode: with other shared holders at the same
    /// time, but with no exclusive one.
    ///
    /// # Errors
    ///
    /// As [`with_lock`](ScopedLocker::with_lock).
    ///
    /// # Panics
    ///
    /// With the panic of `f`, after the release.
    pub fn with_lock_shared<T, E, F>(
        &self,
        cancel: &CancellationToken,
        key: &str,
        f: F,
    ) -> Result<T, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>,
    {
        self.hold(cancel, key, (true, true), f)?.ok_or(ScopeError::Lock(Error::NotAcquired))
    }

    /// Runs `f` as [`with_lock`](ScopedLocker::with_lock) does if the lock is free. `None`: it is
    /// held elsewhere, or no connection was free within `conn_wait_timeout`; an `f` that itself
    /// returns [`Error::NotAcquired`] is a [`ScopeError::Job`].
    ///
    /// # Errors
    ///
    /// As [`with_lock`](ScopedLocker::with_lock). Blocks for as long as a connection takes, at most
    /// `conn_wait_timeout`; for a few statements, of which each takes at most the query time-out; and
    /// for as long as `f` runs.
    ///
    /// # Panics
    ///
    /// With the panic of `f`, after the release.
    pub fn try_with_lock<T, E, F>(&self, key: &str, f: F) -> Result<Option<T>, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>,
    {
        self.hold(&CancellationToken::new(), key, (false, false), f)
    }

    /// [`try_with_lock`](ScopedLocker::try_with_lock) in shared mode.
    ///
    /// # Errors
    ///
    /// As [`try_with_lock`](ScopedLocker::try_with_lock).
    ///
    /// # Panics
    ///
    /// With the panic of `f`, after the release.
    pub fn try_with_lock_shared<T, E, F>(&self, key: &str, f: F) -> Result<Option<T>, ScopeError<E>>
    where
        F: FnOnce() -> Result<T, E>,
    {
        self.hold(&CancellationToken::new(), key, (false, true), f)
    }

    /// Proves that a session can be had and is answered by a primary.
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] if no connection was free within `conn_wait_timeout`; what went wrong
    /// otherwise. Blocks for at most `conn_wait_timeout` plus the query time-out.
    pub fn ping(&self) -> Result<(), Error> {
        let core = Arc::clone(&self.core);
        core.admit()?;
        let result = self.core.run(core.bound(1), None, move || {
            let mut session = core.checkout_unproved(&|| false)?.ok_or(Error::NotAcquired)?;
            session.ping()?;
            session.give_back();
            Ok(())
        });
        let result = result.and_then(|result| result);
        self.core.report(&result);
        result
    }

    /// Lets go of the pool: closures that run finish under their locks, and later calls fail with
    /// [`Error::Closed`]. A pool of the user's stays open. Does not block.
    pub fn close(&self) {
        self.core.close();
    }

    fn hold<T, E>(
        &self,
        cancel: &CancellationToken,
        key: &str,
        (wait, shared): (bool, bool),
        f: impl FnOnce() -> Result<T, E>,
    ) -> Result<Option<T>, ScopeError<E>> {
        if key.is_empty() {
            return Err(Error::EmptyName.into());
        }
        self.core.admit()?;
        if cancel.is_cancelled() {
            return Err(Error::Cancelled.into());
        }
        let named = self.core.named(key);
        let Some(scope) = self.enter(cancel, &named, wait, shared)? else { return Ok(None) };
        let pid = scope.pid;
        let result = catch_unwind(AssertUnwindSafe(f));
        let commit = matches!(result, Ok(Ok(_)));
        if self.core.is_forked() {
            // The closure forked, and this is the child: the transaction is the parent's to end.
            std::mem::forget(scope);
            return match result {
                Ok(Ok(_)) => Err(ScopeError::Lock(Error::Forked)),
                Ok(Err(job)) => Err(ScopeError::Both { job, lock: Error::Forked }),
                Err(panic) => resume_unwind(panic),
            };
        }
        let end = self.core.run(Some(self.core.statement_bound()), None, move || scope.end(commit));
        let end = end.and_then(|end| end);
        self.core.report(&end);
        let event = match &end {
            Ok(()) => LockEvent::Released { pid },
            Err(error) => LockEvent::Lost { pid, error: Some(error.clone()) },
        };
        self.core.tell(&named, event);
        match (result, end) {
            (Err(panic), _) => resume_unwind(panic),
            (Ok(Err(job)), Ok(())) => Err(ScopeError::Job(job)),
            (Ok(Err(job)), Err(lock)) => Err(ScopeError::Both { job, lock }),
            (Ok(Ok(value)), Ok(())) => Ok(Some(value)),
            (Ok(Ok(_)), Err(lost)) => Err(ScopeError::Lock(lost)),
        }
    }

    fn enter(
        &self,
        cancel: &CancellationToken,
        named: &Named,
        wait: bool,
        shared: bool,
    ) -> Result<Option<Scope>, Error> {
        let core = &self.core;
        let bound = if wait { None } else { core.bound(3) };
        let (stop, stopped) = bounded(1);
        // A full channel has the news already.
        let _subscription = cancel.subscribe(move || stop.try_send(()).unwrap_or_default());
        // Two statements, and a cancel request on its way to a server that does not answer.
        let grace = core.statement_bound() * 2 + Duration::from_secs(1);
        let wish = Wish { key: named.key.as_i64(), shared, wait };
        let result = core.run(bound, Some((&stopped, grace)), {
            let (core, send, cancel) =
                (Arc::clone(core), Arc::clone(&self.send_cancel), cancel.clone());
            move || enter(&core, &send, &cancel, wish)
        });
        let result = match result.and_then(|result| result) {
            Err(Error::Timeout(_)) if cancel.is_cancelled() => Err(Error::Cancelled),
            result => result,
        };
        core.report(&result);
        let event = match &result {
            Ok(Some(scope)) => LockEvent::Acquired { pid: scope.pid, shared, ttl: None },
            Ok(None) => LockEvent::Contended,
            Err(error) => LockEvent::Failed { error: error.clone() },
        };
        core.tell(named, event);
        result
    }
}

impl fmt::Debug for ScopedLocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScopedLocker").field("config", &self.core.config).finish_non_exhaustive()
    }
}
