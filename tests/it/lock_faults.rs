//! Module `lock` under faults: a stopped holder, silent servers, poolers, pools that recycle.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::lock::{LockConfig, PooledLocker, ScopeError, ScopedLocker};
use leasehold::postgres::{Client, Config, NoTls};
use leasehold::{CancellationToken, Error, Key};
use r2d2_postgres::PostgresConnectionManager;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::pgbouncer::PgBouncer;
use crate::support::proxy::Fault;
use crate::support::{Proxy, Server};

const LONG: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(30);
/// In a child: the server of the lock to hold.
const HOLDER: &str = "LEASEHOLD_TEST_LOCK_HOLDER";
/// In a child: the server of a scoped lock to wait for.
const WAITER: &str = "LEASEHOLD_TEST_LOCK_WAITER";
const STOPPED_TTL: Duration = Duration::from_secs(1);

fn users_pool(config: Config, size: u32) -> r2d2::Pool<PostgresConnectionManager<NoTls>> {
    let manager = PostgresConnectionManager::new(config, NoTls);
    r2d2::Pool::builder().max_size(size).build_unchecked(manager)
}

/// How many sessions hold or wait for the lock `key` of namespace 0.
fn entries(client: &mut Client, key: &str) -> i64 {
    let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 \
               AND ((classid::int8 << 32) | objid::int8) = $1";
    client.query_one(sql, &[&Key::new(0, key).as_i64()]).unwrap().get(0)
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The child of the test below; does nothing when it is run as a test.
#[test]
fn a_holder_in_a_process_of_its_own() {
    let Ok(url) = std::env::var(HOLDER) else { return };
    let locker = PooledLocker::new(url.parse().unwrap(), LockConfig::new()).unwrap();
    let lock = locker.acquire("stopped-k", STOPPED_TTL).unwrap();
    let mut out = std::io::stdout();
    writeln!(out, "@ held").unwrap();
    while !lock.expired() {
        lock.refresh(STOPPED_TTL).unwrap_or_default();
        thread::sleep(STOPPED_TTL / 20);
    }
    writeln!(out, "@ {:?} {:?}", lock.refresh(LONG), lock.release()).unwrap();
}

#[test]
fn a_stopped_holder_loses_its_lock_after_the_ttl_and_knows_when_it_goes_on() {
    let server = Server::start();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lock_faults::a_holder_in_a_process_of_its_own", "--nocapture"])
        .env(HOLDER, server.url())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next =
        || lines.find_map(|line| line.unwrap().split_once("@ ").map(|(_, said)| said.to_owned()));
    assert_eq!(next().as_deref(), Some("held"));
    let locker = PooledLocker::new(server.config(), LockConfig::new()).unwrap();
    // It refreshes: for longer than its TTL nobody else is granted the lock.
    assert!(locker.acquire_timeout("stopped-k", LONG, STOPPED_TTL * 2).unwrap().is_none());
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    let stopped = Instant::now();
    let lock = locker.acquire_timeout("stopped-k", LONG, PATIENCE).unwrap().unwrap();
    let took = stopped.elapsed();
    assert!(took <= STOPPED_TTL + Duration::from_secs(1), "{took:?}");
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(next().as_deref(), Some("Err(NotHeld) Err(NotHeld)"));
    assert!(child.wait().unwrap().success());
    lock.refresh(LONG).unwrap();
    lock.release().unwrap();
}

#[test]
fn calls_on_a_silent_server_end_within_their_bound() {
    let server = Server::start();
    let limit = Duration::from_millis(500);
    for users in [false, true] {
        let proxy = Proxy::to(&server);
        let options = LockConfig::new().query_timeout(limit).conn_wait_timeout(Some(limit));
        let locker = match users {
            true => PooledLocker::from_pool(users_pool(proxy.config(), 2), options).unwrap(),
            false => PooledLocker::new(proxy.config(), options).unwrap(),
        };
        let (one, two) = (locker.acquire("silent-1", LONG), locker.acquire("silent-2", LONG));
        let (one, two) = (one.unwrap(), two.unwrap());
        let timed = |what: &str, call: &dyn Fn() -> Result<(), Error>| {
            let start = Instant::now();
            let result = call();
            let took = start.elapsed();
            assert!(took < limit * 2 + Duration::from_millis(700), "{what} took {took:?}");
            assert!(result.is_err(), "{what}, of the user's: {users}");
        };
        proxy.stall();
        timed("refresh", &|| one.refresh(LONG));
        assert!(one.expired(), "a lock in doubt is not held");
        timed("acquire", &|| locker.acquire("silent-3", LONG).map(drop));
        timed("close", &|| locker.close());
        let start = Instant::now();
        drop((one, two, locker));
        assert!(start.elapsed() < Duration::from_millis(100), "a drop took {:?}", start.elapsed());
    }
    let mut client = server.client();
    until("the server frees what vanished", || entries(&mut client, "silent-1") == 0);
}

#[test]
fn a_cancelled_wait_on_a_silent_server_ends_within_its_bound() {
    let server = Server::start();
    let limit = Duration::from_millis(500);
    let proxy = Proxy::to(&server);
    let options = LockConfig::new().query_timeout(limit);
    let holder = PooledLocker::new(server.config(), LockConfig::new()).unwrap();
    let held = holder.acquire("mute-k", LONG).unwrap();
    let mut client = server.client();
    for users in [false, true] {
        let locks = match users {
            true => ScopedLocker::from_pool(users_pool(proxy.config(), 2), NoTls, options.clone()),
            false => ScopedLocker::new(proxy.config(), options.clone()),
        };
        let (locks, cancel) = (&locks.unwrap(), &CancellationToken::new());
        thread::scope(|scope| {
            let run = || -> Result<(), Error> { panic!("it ran") };
            let waiter = scope.spawn(move || locks.with_lock(cancel, "mute-k", run));
            until("it waits", || entries(&mut client, "mute-k") == 2);
            proxy.stall();
            let start = Instant::now();
            cancel.cancel();
            let result = waiter.join().unwrap();
            let took = start.elapsed();
            assert!(matches!(result, Err(ScopeError::Lock(Error::Cancelled))), "{result:?}");
            assert!(took < Duration::from_secs(4), "of the user's: {users}: {took:?}");
        });
        proxy.resume();
        // The server looks for vanished clients while they wait.
        until("no ghost waits", || entries(&mut client, "mute-k") == 1);
    }
    held.release().unwrap();
}

#[test]
fn scoped_locks_work_through_a_transaction_pooler_and_pooled_ones_refuse() {
    let server = Server::start();
    let bouncer = PgBouncer::start(&server, "transaction", &[]);
    let mut client = server.client();
    let pooled = PooledLocker::new(bouncer.config(), LockConfig::new()).unwrap();
    assert!(matches!(pooled.acquire("bounced-k", LONG), Err(Error::TransactionPooling)));
    assert!(matches!(pooled.ping(), Err(Error::TransactionPooling)));
    let users = users_pool(bouncer.config(), 3);
    let users = PooledLocker::from_pool(users, LockConfig::new()).unwrap();
    assert!(matches!(users.acquire("bounced-k", LONG), Err(Error::TransactionPooling)));
    assert_eq!(entries(&mut client, "bounced-k"), 0);

    let locks = &ScopedLocker::new(bouncer.config(), LockConfig::new()).unwrap();
    leasehold::lock::conformance::scoped::check_scoped(|| locks.clone());
    let cancel = &CancellationToken::new();
    locks
        .with_lock(&CancellationToken::new(), "bounced-k", || {
            thread::scope(|scope| {
                let run = || -> Result<(), Error> { panic!("it ran") };
                let waiter = scope.spawn(move || locks.with_lock(cancel, "bounced-k", run));
                until("it waits", || entries(&mut client, "bounced-k") == 2);
                cancel.cancel();
                assert!(waiter.join().unwrap().is_err());
                until("it has left the queue", || entries(&mut client, "bounced-k") == 1);
            });
            Ok::<_, Error>(())
        })
        .unwrap();
    until("nothing is left", || entries(&mut client, "bounced-k") == 0);
    // Settings of ours do not stay on the pooler's server sessions.
    let mut next = bouncer.config().connect(NoTls).unwrap();
    let shown = next.simple_query("SHOW idle_in_transaction_session_timeout").unwrap();
    assert!(format!("{shown:?}").contains('0'));
}

/// A pool of one cannot be proved: it is trusted until it is caught.
#[test]
fn a_pooler_behind_a_pool_of_one_is_caught_by_the_next_statement() {
    let server = Server::start();
    let bouncer = PgBouncer::start(&server, "transaction", &[]);
    let options = LockConfig::new().conn_wait_timeout(Some(Duration::from_secs(2)));
    let locker = PooledLocker::from_pool(users_pool(bouncer.config(), 1), options).unwrap();
    let lock = locker.acquire("caught-k", LONG).unwrap();
    // Another client keeps the server session in a transaction; the next statement gets another.
    let mut other = bouncer.config().connect(NoTls).unwrap();
    let mut transaction = other.transaction().unwrap();
    transaction.batch_execute("SELECT 1").unwrap();
    assert!(matches!(lock.refresh(LONG), Err(Error::TransactionPooling)));
    assert!(lock.expired());
}

#[test]
fn a_standby_is_refused_before_anything_is_locked_on_it() {
    let server = Server::start();
    let standby = server.standby();
    let options = || LockConfig::new().conn_wait_timeout(Some(Duration::from_secs(5)));
    let own = PooledLocker::new(standby.config(), options()).unwrap();
    assert!(matches!(own.acquire("standby-k", LONG), Err(Error::NotPrimary)));
    let users = PooledLocker::from_pool(users_pool(standby.config(), 1), options()).unwrap();
    assert!(matches!(users.acquire("standby-k", LONG), Err(Error::NotPrimary)));
    let never = CancellationToken::new();
    let run = || -> Result<(), Error> { panic!("it ran") };
    let scoped = ScopedLocker::new(standby.config(), options()).unwrap();
    let result = scoped.with_lock(&never, "standby-k", run);
    assert!(matches!(result, Err(ScopeError::Lock(Error::NotPrimary))), "{result:?}");
    let pool = users_pool(standby.config(), 1);
    let scoped = ScopedLocker::from_pool(pool, NoTls, options()).unwrap();
    let result = scoped.try_with_lock("standby-k", run);
    assert!(matches!(result, Err(ScopeError::Lock(Error::NotPrimary))), "{result:?}");
    assert_eq!(entries(&mut standby.client(), "standby-k"), 0);
}

#[test]
fn a_pool_survives_a_restart_of_its_server() {
    let mut server = Server::start();
    let locker = PooledLocker::new(server.config(), LockConfig::new()).unwrap();
    let lock = locker.acquire("restart-k", LONG).unwrap();
    let token = lock.token().unwrap();
    locker.acquire("restart-idle", LONG).unwrap().release().unwrap();
    server.kill9();
    server.start_again();
    assert!(matches!(lock.refresh(LONG), Err(Error::NotHeld)));
    // The idle session is dead as well: the pool notices before it hands it out.
    let again = locker.acquire_timeout("restart-k", LONG, PATIENCE).unwrap().unwrap();
    assert!(again.token().unwrap() > token, "a crash gave a token away again");
}

/// The server took the lock, and the answer was an error: the lock must not stay behind in a pool.
#[test]
fn a_try_whose_outcome_is_unknown_leaves_no_lock_behind() {
    let server = Server::start();
    let mut client = server.client();
    for (users, statement) in [(false, "lock_try_known"), (true, "lock_try")] {
        for fault in [Fault::Error, Fault::Reset] {
            let proxy = Proxy::to(&server);
            let options = LockConfig::new();
            let locker = match users {
                true => PooledLocker::from_pool(users_pool(proxy.config(), 2), options).unwrap(),
                false => PooledLocker::new(proxy.config(), options).unwrap(),
            };
            // The sessions are open and proved.
            locker.acquire("doubt-first", LONG).unwrap().release().unwrap();
            proxy.strike(statement, 1, fault);
            let result = locker.acquire("doubt-k", LONG);
            let error = result.map(drop).unwrap_err();
            assert!(matches!(error, Error::Query { .. }), "{statement}, {fault:?}: {error}");
            assert_eq!(proxy.struck(), 1);
            until("the lock is free", || entries(&mut client, "doubt-k") == 0);
            locker.acquire("doubt-k", LONG).unwrap().release().unwrap();
        }
    }
}

/// An unlock that failed, or answered false: its session is never used again.
#[test]
fn a_session_whose_unlock_was_not_confirmed_never_goes_back_into_its_pool() {
    let server = Server::start();
    let mut client = server.client();
    let holder = |client: &mut Client| -> i32 {
        let sql = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 \
                   AND ((classid::int8 << 32) | objid::int8) = $1";
        client.query_one(sql, &[&Key::new(0, "unlock-k").as_i64()]).unwrap().get(0)
    };
    for users in [false, true] {
        for fault in [Fault::Flip, Fault::Error] {
            let proxy = Proxy::to(&server);
            let options = LockConfig::new().pool_size(1);
            let locker = match users {
                true => PooledLocker::from_pool(users_pool(proxy.config(), 1), options).unwrap(),
                false => PooledLocker::new(proxy.config(), options).unwrap(),
            };
            let lock = locker.acquire("unlock-k", LONG).unwrap();
            let pid = holder(&mut client);
            proxy.strike("lock_release", 1, fault);
            let error = lock.release().unwrap_err();
            match fault {
                Fault::Flip => assert!(matches!(error, Error::NotHeld), "{error}"),
                _ => assert!(matches!(error, Error::Query { .. }), "{error}"),
            }
            assert!(lock.expired() && matches!(lock.release(), Err(Error::NotHeld)));
            let again = locker.acquire("unlock-k", LONG).unwrap();
            assert_ne!(holder(&mut client), pid, "of the user's: {users}, {fault:?}");
            again.release().unwrap();
        }
    }
}

/// The child of the test below; does nothing when it is run as a test.
#[test]
fn a_waiter_in_a_process_of_its_own() {
    let Ok(url) = std::env::var(WAITER) else { return };
    let locks = ScopedLocker::new(url.parse().unwrap(), LockConfig::new()).unwrap();
    locks.with_lock(&CancellationToken::new(), "ghost-k", || Ok::<_, Error>(())).unwrap();
}

#[test]
fn a_waiter_that_was_killed_leaves_the_queue_while_the_lock_is_held() {
    let server = Server::start();
    let mut client = server.client();
    let locker = PooledLocker::new(server.config(), LockConfig::new()).unwrap();
    let held = locker.acquire("ghost-k", LONG * 2).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lock_faults::a_waiter_in_a_process_of_its_own", "--nocapture"])
        .env(WAITER, server.url())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    until("it waits", || entries(&mut client, "ghost-k") == 2);
    child.kill().unwrap();
    child.wait().unwrap();
    until("the ghost has left the queue", || entries(&mut client, "ghost-k") == 1);
    held.release().unwrap();
}

/// r2d2 looks for old connections every 30 s, so this takes a minute.
#[test]
fn a_pool_that_recycles_its_connections_leaves_those_that_hold_locks_alone() {
    let server = Server::start();
    let manager = PostgresConnectionManager::new(server.config(), NoTls);
    let pool = r2d2::Pool::builder()
        .max_size(4)
        .max_lifetime(Some(Duration::from_secs(1)))
        .build(manager)
        .unwrap();
    let locker = PooledLocker::from_pool(pool, LockConfig::new()).unwrap();
    let locks: Vec<_> =
        (0..3).map(|i| locker.acquire(&format!("recycled-{i}"), LONG * 2).unwrap()).collect();
    let end = Instant::now() + Duration::from_secs(62);
    while Instant::now() < end {
        locker.acquire("recycled-busy", LONG).unwrap().release().unwrap();
        locks.iter().for_each(|lock| lock.refresh(LONG * 2).unwrap());
        thread::sleep(Duration::from_millis(200));
    }
    locks.iter().for_each(|lock| lock.release().unwrap());
}
