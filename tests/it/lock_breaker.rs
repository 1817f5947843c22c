//! The circuit breaker's table, row by row.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use leasehold::lock::{CircuitBreaker, LockConfig, PooledLocker, ScopeError, ScopedLocker};
use leasehold::{CancellationToken, Error};

use crate::support::Server;

const TTL: Duration = Duration::from_secs(30);

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::start)
}

/// Counts what it is told, and opens when asked.
#[derive(Clone, Default)]
struct Counter(Arc<(AtomicBool, AtomicU32, AtomicU32)>);

impl Counter {
    fn open(&self, open: bool) {
        self.0.0.store(open, Ordering::SeqCst);
    }

    /// Successes and failures since the last call.
    fn take(&self) -> (u32, u32) {
        (self.0.1.swap(0, Ordering::SeqCst), self.0.2.swap(0, Ordering::SeqCst))
    }
}

impl CircuitBreaker for Counter {
    fn can_proceed(&self) -> bool {
        !self.0.0.load(Ordering::SeqCst)
    }

    fn succeeded(&self) {
        self.0.1.fetch_add(1, Ordering::SeqCst);
    }

    fn failed(&self) {
        self.0.2.fetch_add(1, Ordering::SeqCst);
    }
}

const SUCCESS: (u32, u32) = (1, 0);
const FAILURE: (u32, u32) = (0, 1);
const NOTHING: (u32, u32) = (0, 0);

fn pooled(breaker: &Counter, config: LockConfig) -> PooledLocker {
    PooledLocker::new(server().config(), config.breaker(breaker.clone())).unwrap()
}

#[test]
fn answers_are_successes_whatever_they_say() {
    let breaker = Counter::default();
    let locker = pooled(&breaker, LockConfig::new());
    locker.ping().unwrap();
    assert_eq!(breaker.take(), SUCCESS, "ping");
    let lock = locker.acquire("answers-k", TTL).unwrap();
    assert_eq!(breaker.take(), SUCCESS, "granted");
    assert!(locker.try_acquire("answers-k", TTL).unwrap().is_none());
    assert_eq!(breaker.take(), SUCCESS, "held elsewhere");
    lock.refresh(TTL).unwrap();
    assert_eq!(breaker.take(), SUCCESS, "refreshed");
    lock.release().unwrap();
    assert_eq!(breaker.take(), SUCCESS, "released");
}

#[test]
fn a_used_up_pool_is_a_success() {
    let breaker = Counter::default();
    let config = LockConfig::new().pool_size(1);
    let locker = pooled(&breaker, config.conn_wait_timeout(Some(Duration::from_secs(2))));
    let _held = locker.acquire("load-1", TTL).unwrap();
    breaker.take();
    assert!(matches!(locker.acquire("load-2", TTL), Err(Error::NotAcquired)));
    assert_eq!(breaker.take(), SUCCESS);
}

#[test]
fn what_never_reaches_the_database_is_nothing() {
    let breaker = Counter::default();
    let locker = pooled(&breaker, LockConfig::new());
    let lock = locker.acquire("nothing-k", Duration::from_millis(50)).unwrap();
    breaker.take();
    assert!(locker.acquire("", TTL).is_err());
    assert!(locker.acquire("nothing-2", Duration::ZERO).is_err());
    assert!(lock.refresh(Duration::ZERO).is_err());
    while !lock.expired() {
        std::thread::yield_now();
    }
    assert!(matches!(lock.refresh(TTL), Err(Error::NotHeld)));
    assert_eq!(breaker.take(), NOTHING);
    locker.close().unwrap_or_default();
    breaker.take();
    assert!(matches!(lock.release(), Err(Error::NotHeld)));
    assert!(matches!(locker.acquire("nothing-k", TTL), Err(Error::Closed)));
    assert_eq!(breaker.take(), NOTHING);
}

#[test]
fn an_endpoint_that_cannot_be_reached_is_a_failure() {
    let breaker = Counter::default();
    let options = LockConfig::new()
        .breaker(breaker.clone())
        .conn_wait_timeout(Some(Duration::from_millis(300)));
    let nobody = "postgres://nobody@127.0.0.1:1/none".parse().unwrap();
    let locker = PooledLocker::new(nobody, options).unwrap();
    assert!(locker.acquire("away", TTL).is_err());
    assert_eq!(breaker.take(), FAILURE);
    assert!(locker.ping().is_err());
    assert_eq!(breaker.take(), FAILURE);
}

#[test]
fn a_session_that_ended_is_a_failure() {
    let breaker = Counter::default();
    let locker = pooled(&breaker, LockConfig::new().application_name("breaker-ended"));
    let end = || {
        let mut client = server().client();
        let sql = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity \
                   WHERE application_name = 'breaker-ended'";
        client.execute(sql, &[]).unwrap();
    };
    for refresh in [true, false] {
        let lock = locker.acquire("ended-k", TTL).unwrap();
        end();
        breaker.take();
        let result = if refresh { lock.refresh(TTL) } else { lock.release() };
        assert!(matches!(result, Err(Error::NotHeld)), "{result:?}");
        assert_eq!(breaker.take(), FAILURE, "refresh: {refresh}");
    }
}

#[test]
fn an_open_breaker_refuses_and_leaves_locks_held() {
    let breaker = Counter::default();
    // Nobody listens there: the pool is not touched.
    let nobody = "postgres://nobody@127.0.0.1:1/none".parse().unwrap();
    let away = PooledLocker::new(nobody, LockConfig::new().breaker(breaker.clone())).unwrap();
    let locker = pooled(&breaker, LockConfig::new());
    let lock = locker.acquire("open-k", TTL).unwrap();
    breaker.take();
    breaker.open(true);
    assert!(matches!(away.acquire("open-k", TTL), Err(Error::CircuitOpen)));
    assert!(matches!(away.ping(), Err(Error::CircuitOpen)));
    assert!(matches!(lock.refresh(TTL), Err(Error::CircuitOpen)));
    assert!(matches!(lock.release(), Err(Error::CircuitOpen)));
    assert!(!lock.expired());
    assert_eq!(breaker.take(), NOTHING);
    breaker.open(false);
    assert!(locker.try_acquire("open-k", TTL).unwrap().is_none(), "it is still held");
    lock.release().unwrap();
    // A drop releases even so.
    let lock = locker.acquire("open-k", TTL).unwrap();
    breaker.open(true);
    drop(lock);
    breaker.open(false);
    drop(locker.acquire_timeout("open-k", TTL, TTL).unwrap().unwrap());
}

#[test]
fn a_scoped_lock_counts_its_transaction_and_not_its_closure() {
    let breaker = Counter::default();
    let options = LockConfig::new().breaker(breaker.clone());
    let locks = ScopedLocker::new(server().config(), options).unwrap();
    let never = CancellationToken::new();
    let failed = locks.with_lock(&never, "scope-k", || Err::<(), _>("mine"));
    assert!(matches!(failed, Err(ScopeError::Job("mine"))));
    assert_eq!(breaker.take(), (2, 0), "begin and rollback");
    never.cancel();
    assert!(locks.with_lock(&never, "scope-k", || Ok::<_, Error>(())).is_err());
    assert_eq!(breaker.take(), NOTHING, "cancelled");
    breaker.open(true);
    let refused = locks.try_with_lock("scope-k", || Ok::<_, Error>(()));
    assert!(matches!(refused, Err(ScopeError::Lock(Error::CircuitOpen))));
}
