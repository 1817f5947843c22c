//! What is promised of public types, checked by the compiler.

use leasehold::lock::{
    CircuitBreaker, DistributedLock, DistributedLocker, Lock, LockConfig, MemoryLock, MemoryLocker,
    NoBreaker, NoopLock, NoopLocker, PooledLocker, ScopeError, Scoped, ScopedLocker,
};
use leasehold::{
    Budget, CancelReason, CancellationToken, DropGuard, Error, Event, FencingToken, Holder, Key,
    Lease, LeaseGuard, LockEvent, Locker, LostReason, Options, RunError, SessionTtl, Timeout,
};

fn shared<T: Send + Sync + 'static>() {}
fn dynamic<T: Send + Sync + ?Sized>() {}
fn cloned<T: Clone>() {}

#[test]
fn every_public_type_may_be_shared_among_threads() {
    shared::<Locker>();
    shared::<Options>();
    shared::<Budget>();
    shared::<Holder>();
    shared::<Lease>();
    shared::<LeaseGuard>();
    shared::<CancellationToken>();
    shared::<CancelReason>();
    shared::<DropGuard>();
    shared::<FencingToken>();
    shared::<Key>();
    shared::<SessionTtl>();
    shared::<Event>();
    shared::<LockEvent>();
    shared::<Error>();
    shared::<LostReason>();
    shared::<Timeout>();
    shared::<RunError<Error>>();
    shared::<PooledLocker>();
    shared::<Lock>();
    shared::<ScopedLocker>();
    shared::<Scoped<PooledLocker>>();
    shared::<ScopeError<Error>>();
    shared::<LockConfig>();
    shared::<MemoryLocker>();
    shared::<MemoryLock>();
    shared::<NoopLocker>();
    shared::<NoopLock>();
    shared::<NoBreaker>();
    dynamic::<dyn DistributedLocker>();
    dynamic::<dyn DistributedLock>();
    dynamic::<dyn CircuitBreaker>();
}

#[test]
fn handles_are_cheap_to_share_by_cloning() {
    cloned::<Locker>();
    cloned::<CancellationToken>();
    cloned::<PooledLocker>();
    cloned::<ScopedLocker>();
    cloned::<MemoryLocker>();
    cloned::<NoopLocker>();
}

/// The types of a user's pool, by the paths under which this crate re-exports them.
#[test]
fn a_pool_can_be_brought_without_depending_on_its_crates() {
    use leasehold::postgres::NoTls;
    use leasehold::r2d2::Pool;
    use leasehold::r2d2_postgres::PostgresConnectionManager;

    let config = "postgres://nobody@127.0.0.1:1/none".parse().unwrap();
    let pool = Pool::builder().build_unchecked(PostgresConnectionManager::new(config, NoTls));
    PooledLocker::from_pool(pool, LockConfig::new()).unwrap();
}
