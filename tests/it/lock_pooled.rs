//! Pooled locks: the TTL is real, sessions in doubt are never used again, nothing is left behind.

use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::lock::{LockConfig, PooledLocker};
use leasehold::postgres::{Client, Config, NoTls};
use leasehold::{Error, Event, Key, LockEvent};
use r2d2_postgres::PostgresConnectionManager;

use crate::support::Server;

const LONG: Duration = Duration::from_secs(60);
/// For what the server must do by itself.
const PATIENCE: Duration = Duration::from_secs(20);

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::start)
}

/// Options with a name that tells this test's sessions from those of others on the server.
fn options(name: &str) -> LockConfig {
    LockConfig::new().application_name(name)
}

fn locker(name: &str) -> PooledLocker {
    PooledLocker::new(server().config(), options(name)).unwrap()
}

fn users_pool(config: Config, size: u32) -> r2d2::Pool<PostgresConnectionManager<NoTls>> {
    let manager = PostgresConnectionManager::new(config, NoTls);
    r2d2::Pool::builder().max_size(size).build(manager).unwrap()
}

/// The backends that hold the lock `key` of namespace 0, with the mode.
fn holders(client: &mut Client, key: &str) -> Vec<(i32, String)> {
    let sql = "SELECT pid, mode FROM pg_locks WHERE locktype = 'advisory' AND granted \
               AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
               AND objsubid = 1 AND ((classid::int8 << 32) | objid::int8) = $1 ORDER BY pid";
    let rows = client.query(sql, &[&Key::new(0, key).as_i64()]).unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Sessions with this name: pid, and the time-out that applies to them is asked elsewhere.
fn sessions(client: &mut Client, name: &str) -> Vec<i32> {
    let sql = "SELECT pid FROM pg_stat_activity WHERE application_name = $1 ORDER BY pid";
    client.query(sql, &[&name]).unwrap().iter().map(|row| row.get(0)).collect()
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(2));
    }
    start.elapsed()
}

/// Keeps what happened to locks.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<LockEvent>>>);

impl Seen {
    fn attach(&self, config: LockConfig) -> LockConfig {
        let seen = Arc::clone(&self.0);
        config.on_event(move |event| {
            if let Event::Lock { what, .. } = event {
                seen.lock().unwrap().push(what.clone());
            }
        })
    }

    fn wait_for(&self, what: &str, wanted: impl Fn(&LockEvent) -> bool) {
        until(what, || self.0.lock().unwrap().iter().any(&wanted));
    }
}

#[test]
fn checks_come_in_the_documented_order_and_before_any_connection() {
    // Nobody listens there: whatever needs a connection would fail otherwise.
    let config: Config = "postgres://nobody@127.0.0.1:1/none".parse().unwrap();
    let options = options("order").conn_wait_timeout(Some(Duration::from_millis(300)));
    let locker = PooledLocker::new(config, options).unwrap();
    assert!(matches!(locker.acquire("", Duration::ZERO), Err(Error::EmptyName)));
    assert!(matches!(locker.acquire("k", Duration::ZERO), Err(Error::InvalidTtl)));
    assert!(matches!(locker.acquire("k", Duration::MAX), Err(Error::InvalidTtl)));
    let start = Instant::now();
    assert!(matches!(locker.acquire("k", LONG), Err(Error::Connect(_))));
    assert!(matches!(locker.ping(), Err(Error::Connect(_))));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    locker.close().unwrap();
    assert!(matches!(locker.acquire("", LONG), Err(Error::EmptyName)));
    assert!(matches!(locker.acquire("k", LONG), Err(Error::Closed)));
}

#[test]
fn a_lock_is_the_advisory_lock_that_other_languages_would_take() {
    let (locker, mut other) = (locker("golden"), server().client());
    let lock = locker.acquire("golden-chore", LONG).unwrap();
    let key = Key::new(0, "golden-chore").as_i64();
    let granted = |client: &mut Client| -> bool {
        client.query_one("SELECT pg_try_advisory_lock($1)", &[&key]).unwrap().get(0)
    };
    assert!(!granted(&mut other));
    lock.release().unwrap();
    assert!(granted(&mut other));
    assert!(matches!(locker.acquire("golden-chore", LONG), Err(Error::NotAcquired)));
    let elsewhere = PooledLocker::new(server().config(), options("golden").namespace(7)).unwrap();
    drop(elsewhere.acquire("golden-chore", LONG).unwrap());
}

#[test]
fn shared_locks_admit_each_other_and_no_exclusive_one() {
    let (locker, mut client) = (locker("shared"), server().client());
    let one = locker.acquire_shared("shared-k", LONG).unwrap();
    let two = locker.try_acquire_shared("shared-k", LONG).unwrap().unwrap();
    assert!(one.is_shared() && one.token().is_ok());
    assert!(locker.try_acquire("shared-k", LONG).unwrap().is_none());
    assert!(holders(&mut client, "shared-k").iter().all(|(_, mode)| mode == "ShareLock"));
    two.refresh(LONG).unwrap();
    one.release().unwrap();
    two.release().unwrap();
    let alone = locker.acquire("shared-k", LONG).unwrap();
    assert!(locker.try_acquire_shared("shared-k", LONG).unwrap().is_none());
    drop(alone);
    assert!(locker.acquire_shared_timeout("shared-k", LONG, PATIENCE).unwrap().is_some());
}

#[test]
fn tokens_grow_from_holder_to_holder_and_stay_for_one() {
    let locker = locker("tokens");
    let mut last = None;
    for _ in 0..5 {
        let lock = locker.acquire("tokens-k", LONG).unwrap();
        let token = lock.token().unwrap();
        assert_eq!(lock.token().unwrap(), token);
        assert!(Some(token) > last, "{token} after {last:?}");
        last = Some(token);
        lock.release().unwrap();
        assert_eq!(lock.token().unwrap(), token);
    }
    let lock = locker.acquire("tokens-k", LONG).unwrap();
    lock.release().unwrap();
    assert!(matches!(lock.token(), Err(Error::NotHeld)));
}

#[test]
fn a_session_killed_under_a_lock_is_not_held_and_never_used_again() {
    let seen = Seen::default();
    let options = seen.attach(options("killed").pool_size(1));
    let locker = PooledLocker::new(server().config(), options).unwrap();
    let mut client = server().client();
    for call in ["refresh", "release", "token"] {
        let lock = locker.acquire("killed-k", LONG).unwrap();
        let [(pid, _)] = holders(&mut client, "killed-k")[..] else { panic!("no holder") };
        server().terminate(pid);
        until("the session ends", || !sessions(&mut client, "killed").contains(&pid));
        let result = match call {
            "refresh" => lock.refresh(LONG * 2),
            "release" => lock.release(),
            _ => lock.token().map(drop),
        };
        assert!(matches!(result, Err(Error::NotHeld)), "{call}: {result:?}");
        assert_eq!(lock.ttl(), LONG);
        assert!(lock.expired(), "{call}");
        assert!(matches!(lock.release(), Err(Error::NotHeld)));
        // The pool of one has room for another session: the dead one is out of it.
        drop(locker.acquire("killed-k", LONG).unwrap());
        until("released", || holders(&mut client, "killed-k").is_empty());
    }
    seen.wait_for("the loss", |event| matches!(event, LockEvent::Lost { error: Some(_), .. }));
}

#[test]
fn a_dead_session_of_a_users_pool_is_not_held_and_leaves_the_pool() {
    let pool = users_pool(server().config(), 2);
    let locker = PooledLocker::from_pool(pool.clone(), LockConfig::new()).unwrap();
    let mut client = server().client();
    for call in ["refresh", "release"] {
        let lock = locker.acquire("user-killed-k", LONG).unwrap();
        let pid = holders(&mut client, "user-killed-k")[0].0;
        server().terminate(pid);
        until("the session ends", || holders(&mut client, "user-killed-k").is_empty());
        let result = if call == "refresh" { lock.refresh(LONG) } else { lock.release() };
        assert!(matches!(result, Err(Error::NotHeld)), "{call}: {result:?}");
        let again = locker.acquire("user-killed-k", LONG).unwrap();
        assert_ne!(holders(&mut client, "user-killed-k")[0].0, pid);
        again.release().unwrap();
    }
}

#[test]
fn a_holder_that_ignores_its_ttl_loses_the_lock_by_the_servers_hand() {
    let locker = locker("ttl");
    let mut client = server().client();
    let ttl = Duration::from_millis(400);
    let start = Instant::now();
    let lock = locker.acquire("ttl-k", ttl).unwrap();
    let taken = locker.acquire_timeout("ttl-k", LONG, PATIENCE).unwrap().unwrap();
    let took = start.elapsed();
    assert!(lock.expired(), "the server freed it before the holder's own clock");
    assert!(took >= ttl && took < ttl + Duration::from_millis(1500), "{took:?}");
    assert_eq!(holders(&mut client, "ttl-k").len(), 1);
    assert!(matches!(lock.release(), Err(Error::NotHeld)));
    assert_eq!(holders(&mut client, "ttl-k").len(), 1);
    taken.release().unwrap();
}

#[test]
fn refreshes_keep_a_lock_well_beyond_its_ttl() {
    let locker = locker("refreshed");
    let ttl = Duration::from_millis(300);
    let lock = locker.acquire("refreshed-k", ttl).unwrap();
    let end = Instant::now() + ttl * 6;
    while Instant::now() < end {
        thread::sleep(ttl / 3);
        lock.refresh(ttl).unwrap();
        assert!(lock.remaining() <= ttl);
    }
    lock.release().unwrap();
}

#[test]
fn without_enforcement_the_ttl_is_the_clients_bookkeeping() {
    let options = options("lax").enforce_ttl(false);
    let locker = PooledLocker::new(server().config(), options).unwrap();
    let ttl = Duration::from_millis(100);
    let lock = locker.acquire("lax-k", ttl).unwrap();
    until("the TTL passes", || lock.expired());
    thread::sleep(ttl * 3);
    assert!(locker.try_acquire("lax-k", LONG).unwrap().is_none());
    assert!(matches!(lock.refresh(LONG), Err(Error::NotHeld)));
    assert!(matches!(lock.release(), Err(Error::NotHeld)));
    // Unlocked all the same.
    drop(locker.acquire("lax-k", LONG).unwrap());
}

#[test]
fn a_session_goes_back_with_the_idle_limit_it_came_with() {
    let mut config = server().config();
    config.options("-c idle_session_timeout=777s");
    let pool = users_pool(config, 1);
    let locker = PooledLocker::from_pool(pool.clone(), options("restored")).unwrap();
    let lock = locker.acquire("restored-k", Duration::from_secs(30)).unwrap();
    assert_eq!(pool.state().idle_connections, 0);
    lock.refresh(Duration::from_secs(40)).unwrap();
    lock.release().unwrap();
    let shown = pool.get().unwrap().query_one("SHOW idle_session_timeout", &[]).unwrap();
    assert_eq!(shown.get::<_, String>(0), "777s");
}

#[test]
fn foreign_locks_on_a_users_session_survive_ours() {
    let pool = users_pool(server().config(), 1);
    pool.get().unwrap().execute("SELECT pg_advisory_lock(4711)", &[]).unwrap();
    let locker = PooledLocker::from_pool(pool.clone(), options("foreign")).unwrap();
    let lock = locker.acquire("foreign-k", LONG).unwrap();
    lock.refresh(LONG).unwrap();
    lock.release().unwrap();
    let sql = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objid = 4711";
    assert_eq!(pool.get().unwrap().query_one(sql, &[]).unwrap().get::<_, i64>(0), 1);
}

#[test]
fn a_pool_that_is_used_up_is_contention_after_the_wait() {
    let options = options("busy").pool_size(1).conn_wait_timeout(Some(Duration::from_millis(50)));
    let locker = PooledLocker::new(server().config(), options).unwrap();
    let held = loop {
        // Opening the first session may take longer than the wait.
        match locker.acquire("busy-1", LONG) {
            Ok(lock) => break lock,
            Err(error) => assert!(matches!(error, Error::NotAcquired), "{error}"),
        }
    };
    let start = Instant::now();
    assert!(matches!(locker.acquire("busy-2", LONG), Err(Error::NotAcquired)));
    let waited = start.elapsed();
    assert!(
        waited >= Duration::from_millis(50) && waited < Duration::from_millis(150),
        "{waited:?}"
    );
    held.release().unwrap();
    drop(locker.acquire("busy-2", LONG).unwrap());
}

#[test]
fn a_timed_wait_on_a_used_up_pool_ends_with_its_own_time() {
    for wait in [Some(LONG), None] {
        let options = options("short").pool_size(1).conn_wait_timeout(wait);
        let locker = PooledLocker::new(server().config(), options).unwrap();
        let _held = locker.acquire("short-1", LONG).unwrap();
        let start = Instant::now();
        let timeout = Duration::from_millis(100);
        assert!(locker.acquire_timeout("short-2", LONG, timeout).unwrap().is_none());
        let took = start.elapsed();
        assert!(took >= timeout && took < Duration::from_secs(2), "{took:?}");
    }
}

#[test]
fn a_wait_for_a_connection_without_limit_lasts_until_there_is_one() {
    let options = options("patient").pool_size(1).conn_wait_timeout(None);
    let locker = PooledLocker::new(server().config(), options).unwrap();
    let held = locker.acquire("patient-1", LONG).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| locker.acquire("patient-2", LONG).map(drop));
        thread::sleep(Duration::from_millis(200));
        assert!(!waiter.is_finished());
        held.release().unwrap();
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn a_close_releases_what_is_out_and_ends_the_sessions() {
    let locker = locker("close");
    let mut client = server().client();
    let locks: Vec<_> =
        (0..4).map(|i| locker.acquire(&format!("close-{i}"), LONG).unwrap()).collect();
    locker.close().unwrap();
    for (i, lock) in locks.iter().enumerate() {
        assert!(lock.expired());
        assert!(matches!(lock.release(), Err(Error::NotHeld)));
        assert_eq!(holders(&mut client, &format!("close-{i}")), []);
    }
    until("no session left", || sessions(&mut client, "close").is_empty());
    assert!(matches!(locker.acquire("close-0", LONG), Err(Error::Closed)));
}

#[test]
fn a_close_gives_the_first_error_and_releases_the_others() {
    let locker = locker("close-error");
    let mut client = server().client();
    let one = locker.acquire("close-error-1", LONG).unwrap();
    let two = locker.acquire("close-error-2", LONG).unwrap();
    server().terminate(holders(&mut client, "close-error-1")[0].0);
    until("the session ends", || holders(&mut client, "close-error-1").is_empty());
    assert!(matches!(locker.close(), Err(Error::NotHeld)));
    assert_eq!(holders(&mut client, "close-error-2"), []);
    drop((one, two));
}

#[test]
fn drops_release_without_blocking() {
    let locker = locker("drops");
    let mut client = server().client();
    locker.ping().unwrap();
    let lock = locker.acquire("drops-k", LONG).unwrap();
    let start = Instant::now();
    drop(lock);
    let took = start.elapsed();
    assert!(took < Duration::from_millis(50), "{took:?}");
    until("released", || holders(&mut client, "drops-k").is_empty());
    // Its session is whole and in the pool again.
    let before = sessions(&mut client, "drops");
    locker.acquire("drops-k", LONG).unwrap().release().unwrap();
    assert_eq!(sessions(&mut client, "drops"), before);
    drop(locker);
    until("no session left", || sessions(&mut client, "drops").is_empty());
}

#[test]
fn a_timed_wait_is_honoured_and_leaves_nothing() {
    let locker = locker("timed");
    let held = locker.acquire("timed-k", LONG).unwrap();
    for timeout in [0, 30, 120].map(Duration::from_millis) {
        // Other tests share the processors: one of a few tries must make it.
        let late = |_| {
            let start = Instant::now();
            assert!(locker.acquire_timeout("timed-k", LONG, timeout).unwrap().is_none());
            assert!(start.elapsed() >= timeout);
            start.elapsed() - timeout
        };
        let late = (0..5).map(late).min().unwrap();
        assert!(late < Duration::from_millis(50), "{late:?} later than {timeout:?}");
    }
    thread::scope(|scope| {
        let waiter = scope.spawn(|| locker.acquire_timeout("timed-k", LONG, LONG * 60 * 24));
        held.release().unwrap();
        waiter.join().unwrap().unwrap().unwrap().release().unwrap();
    });
}

#[test]
fn ten_thousand_timed_waits_under_contention_leave_nothing() {
    let locker = locker("storm");
    let mut client = server().client();
    let per_thread = 10_000 / 8;
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..per_thread {
                    let wait = Duration::from_micros(fastrand::u64(0..2000));
                    if let Some(lock) = locker.acquire_timeout("storm-k", LONG, wait).unwrap() {
                        if fastrand::bool() {
                            lock.release().unwrap();
                        }
                    }
                }
            });
        }
    });
    until("nothing left in pg_locks", || holders(&mut client, "storm-k").is_empty());
    assert!(sessions(&mut client, "storm").len() <= 10);
}

/// An answer that says no is no loss: the session lives, and can be asked again.
#[test]
fn a_refresh_that_failed_can_be_repeated_within_the_ttl() {
    let server = Server::start();
    let mut config = server.config();
    config.application_name("repeat");
    let locker = PooledLocker::from_pool(users_pool(config, 1), LockConfig::new()).unwrap();
    let lock = locker.acquire("repeat-k", LONG).unwrap();
    let (mut client, mut blocker) = (server.client(), server.client());
    let [pid] = sessions(&mut client, "repeat")[..] else { panic!("one session") };
    // A refresh reads this catalogue, so it waits, and is cancelled.
    let mut transaction = blocker.transaction().unwrap();
    transaction.batch_execute("LOCK TABLE pg_database IN ACCESS EXCLUSIVE MODE").unwrap();
    thread::scope(|scope| {
        let refresh = scope.spawn(|| lock.refresh(LONG * 2));
        let waiting =
            "SELECT count(*) FROM pg_stat_get_activity($1) WHERE wait_event_type = 'Lock'";
        until("the refresh waits", || {
            client.query_one(waiting, &[&pid]).unwrap().get::<_, i64>(0) == 1
        });
        client.execute("SELECT pg_cancel_backend($1)", &[&pid]).unwrap();
        let error = refresh.join().unwrap().unwrap_err();
        assert!(error.is_timeout(), "{error}");
    });
    assert!(!lock.expired() && lock.ttl() == LONG);
    transaction.rollback().unwrap();
    lock.refresh(LONG * 2).unwrap();
    assert_eq!(lock.ttl(), LONG * 2);
    lock.release().unwrap();
}
