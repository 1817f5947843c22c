//! PostgreSQL keeps the contract of module `lock`, with nothing skipped.

use std::sync::OnceLock;
use std::time::Duration;

use leasehold::lock::conformance::{CHECKS, Contract, check_locker, scoped::check_scoped};
use leasehold::lock::{LockConfig, PooledLocker, Scoped, ScopedLocker};
use postgres::NoTls;
use r2d2_postgres::PostgresConnectionManager;

use crate::support::Server;

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::start)
}

fn pooled() -> PooledLocker {
    PooledLocker::new(server().config(), LockConfig::new().pool_size(3)).unwrap()
}

fn users_pool() -> r2d2::Pool<PostgresConnectionManager<NoTls>> {
    let manager = PostgresConnectionManager::new(server().config(), NoTls);
    r2d2::Pool::builder().max_size(3).build_unchecked(manager)
}

#[test]
fn the_pooled_locker_conforms_with_nothing_skipped() {
    let contract = Contract::new(|| Box::new(pooled()));
    assert!(CHECKS.iter().all(|check| contract.runs(check)));
    check_locker(&contract);
}

#[test]
fn the_pooled_locker_conforms_on_a_pool_of_the_users() {
    check_locker(&Contract::new(|| {
        Box::new(PooledLocker::from_pool(users_pool(), LockConfig::new()).unwrap())
    }));
}

#[test]
fn the_scoped_locker_conforms() {
    check_scoped(|| ScopedLocker::new(server().config(), LockConfig::new()).unwrap());
}

#[test]
fn the_scoped_locker_conforms_when_it_waits_in_slices() {
    let config = LockConfig::new().wait_slice(Some(Duration::from_millis(50)));
    check_scoped(|| ScopedLocker::new(server().config(), config.clone()).unwrap());
}

#[test]
fn the_scoped_locker_conforms_on_a_pool_of_the_users() {
    check_scoped(|| ScopedLocker::from_pool(users_pool(), NoTls, LockConfig::new()).unwrap());
}

#[test]
fn a_scoped_lock_made_of_a_pooled_locker_conforms() {
    check_scoped(|| Scoped::new(pooled(), Duration::from_secs(30)).unwrap());
}
