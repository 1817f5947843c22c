//! Every public call of module `lock` works on a thread that is inside an async runtime.

use std::sync::OnceLock;
use std::time::Duration;

use leasehold::lock::{LockConfig, PooledLocker, Scoped, ScopedLock, ScopedLocker};
use leasehold::postgres::NoTls;
use leasehold::{CancellationToken, Error};
use r2d2_postgres::PostgresConnectionManager;

use crate::support::Server;

const TTL: Duration = Duration::from_secs(30);

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::start)
}

/// A pool of the user's, made where that is allowed.
fn users_pool() -> r2d2::Pool<PostgresConnectionManager<NoTls>> {
    let manager = PostgresConnectionManager::new(server().config(), NoTls);
    r2d2::Pool::builder().max_size(3).build_unchecked(manager)
}

fn use_pooled(locker: PooledLocker, key: &str) {
    locker.ping().unwrap();
    let lock = locker.acquire(key, TTL).unwrap();
    assert!(locker.try_acquire(key, TTL).unwrap().is_none());
    lock.token().unwrap();
    lock.refresh(TTL).unwrap();
    lock.release().unwrap();
    drop(locker.acquire_timeout(key, TTL, TTL).unwrap().unwrap());
    let shared = locker.acquire_shared_timeout(key, TTL, TTL).unwrap();
    let lapsed = locker.acquire("runtime-lapsed", Duration::from_millis(50)).unwrap();
    while !lapsed.expired() {
        std::thread::yield_now();
    }
    assert!(matches!(lapsed.release(), Err(Error::NotHeld)));
    locker.close().unwrap();
    drop((shared, locker));
}

fn use_scoped(locks: &impl ScopedLock, key: &str) {
    let never = CancellationToken::new();
    let here = std::thread::current().id();
    let nested = locks.with_lock(&never, key, || {
        assert_eq!(std::thread::current().id(), here);
        locks.try_with_lock(key, || Ok::<_, Error>(()))
    });
    assert_eq!(nested.unwrap(), None);
    assert!(locks.try_with_lock(key, || Err::<(), _>("mine")).is_err());
    // A wait that is cancelled from the runtime's own thread.
    locks
        .with_lock(&never, key, || {
            let cancel = CancellationToken::new();
            let setter = cancel.clone();
            let thread = std::thread::spawn(move || setter.cancel());
            assert!(locks.with_lock(&cancel, key, || Ok::<_, Error>(())).is_err());
            assert!(thread.join().unwrap());
            Ok::<_, Error>(())
        })
        .unwrap();
}

fn use_everything(tag: &str) {
    let config = || server().config();
    use_pooled(PooledLocker::new(config(), LockConfig::new()).unwrap(), &format!("{tag}-own"));
    let users = PooledLocker::from_pool(users_pool(), LockConfig::new()).unwrap();
    use_pooled(users, &format!("{tag}-users"));
    let scoped = ScopedLocker::new(config(), LockConfig::new()).unwrap();
    scoped.ping().unwrap();
    use_scoped(&scoped, &format!("{tag}-scoped"));
    let users = ScopedLocker::from_pool(users_pool(), NoTls, LockConfig::new()).unwrap();
    use_scoped(&users, &format!("{tag}-users-scoped"));
    let pooled = PooledLocker::new(config(), LockConfig::new()).unwrap();
    use_scoped(&Scoped::new(pooled, TTL).unwrap(), &format!("{tag}-adapter"));
    scoped.close();
}

#[test]
fn every_call_works_inside_a_runtime_and_on_its_blocking_threads() {
    // Started where blocking is allowed.
    server();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        use_everything("async");
        tokio::task::spawn_blocking(|| use_everything("blocking")).await.unwrap();
    });
    use_everything("plain");
}
