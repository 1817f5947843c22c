//! Scoped locks: as long as the closure, in order, with no ghost and no snapshot left behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::lock::{LockConfig, ScopeError, ScopedLocker};
use leasehold::postgres::Client;
use leasehold::{CancellationToken, Error, Key, LostReason};

use crate::support::Server;

const PATIENCE: Duration = Duration::from_secs(20);

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(Server::start)
}

fn locker(name: &str, config: LockConfig) -> ScopedLocker {
    ScopedLocker::new(server().config(), config.application_name(name)).unwrap()
}

fn never() -> CancellationToken {
    CancellationToken::new()
}

/// Holders of and waiters for the lock `key` of namespace 0: pid, and whether it is granted.
fn queue(client: &mut Client, key: &str) -> Vec<(i32, bool)> {
    let sql = "SELECT pid, granted FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 \
               AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
               AND ((classid::int8 << 32) | objid::int8) = $1 ORDER BY granted DESC, pid";
    let rows = client.query(sql, &[&Key::new(0, key).as_i64()]).unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn waiters(client: &mut Client, key: &str) -> usize {
    queue(client, key).iter().filter(|(_, granted)| !granted).count()
}

#[test]
fn the_transaction_is_read_only_read_committed_and_has_no_snapshot_while_the_closure_runs() {
    let locks = locker("shape", LockConfig::new());
    let mut client = server().client();
    locks
        .with_lock(&never(), "shape-k", || {
            let [(pid, true)] = queue(&mut client, "shape-k")[..] else { panic!("one holder") };
            let sql = "SELECT state, backend_xmin::text, backend_xid::text \
                       FROM pg_stat_activity WHERE pid = $1";
            let row = client.query_one(sql, &[&pid]).unwrap();
            assert_eq!(row.get::<_, &str>(0), "idle in transaction");
            assert_eq!(row.get::<_, Option<&str>>(1), None, "a snapshot is held");
            assert_eq!(row.get::<_, Option<&str>>(2), None);
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!(queue(&mut client, "shape-k"), []);
}

#[test]
fn the_servers_limits_do_not_end_a_scoped_lock() {
    let server = Server::start();
    let limits = "ALTER SYSTEM SET idle_in_transaction_session_timeout = '100ms'; \
                  ALTER SYSTEM SET statement_timeout = '300ms'; \
                  ALTER SYSTEM SET lock_timeout = '100ms'; SELECT pg_reload_conf()";
    let mut client = server.client();
    for statement in limits.split("; ") {
        client.batch_execute(statement).unwrap();
    }
    let shown = |client: &mut Client| {
        client
            .query_one("SHOW idle_in_transaction_session_timeout", &[])
            .unwrap()
            .get::<_, String>(0)
    };
    until("the limits are in force", || shown(&mut server.client()) == "100ms");
    let locks = ScopedLocker::new(server.config(), LockConfig::new()).unwrap();
    let waits = Duration::from_millis(600);
    thread::scope(|scope| {
        let (inside, entered) = channel();
        let locks = &locks;
        scope.spawn(move || {
            locks
                .with_lock(&never(), "limits-k", || {
                    inside.send(()).unwrap();
                    thread::sleep(waits);
                    Ok::<_, Error>(())
                })
                .unwrap();
        });
        entered.recv().unwrap();
        // Waits for longer than both limits on statements.
        locks.with_lock(&never(), "limits-k", || Ok::<_, Error>(())).unwrap();
    });
}

#[test]
fn a_closure_that_outstays_max_hold_loses_the_lock_and_hears_of_it() {
    let config = LockConfig::new().max_hold(Some(Duration::from_millis(100)));
    let locks = locker("hold", config);
    let mut client = server().client();
    let result = locks.with_lock(&never(), "hold-k", || {
        until("the server ends it", || queue(&mut client, "hold-k").is_empty());
        Ok::<_, Error>(())
    });
    let lost = matches!(result, Err(ScopeError::Lock(Error::Lost(LostReason::SessionEnded))));
    assert!(lost, "{result:?}");
    assert!(locks.try_with_lock("hold-k", || Ok::<_, Error>(())).unwrap().is_some());
}

#[test]
fn a_commit_that_fails_is_a_loss_also_beside_a_closures_own_error() {
    let locks = locker("commit", LockConfig::new());
    let mut client = server().client();
    let mut kill = || {
        let [(pid, true)] = queue(&mut client, "commit-k")[..] else { panic!("one holder") };
        server().terminate(pid);
        until("it ends", || queue(&mut client, "commit-k").is_empty());
    };
    let result = locks.with_lock(&never(), "commit-k", || {
        kill();
        Ok::<_, Error>(())
    });
    assert!(matches!(result, Err(ScopeError::Lock(Error::Lost(LostReason::SessionEnded)))));
    let result = locks.with_lock(&never(), "commit-k", || {
        kill();
        Err::<(), _>("mine")
    });
    let Err(ScopeError::Both { job: "mine", lock }) = &result else { panic!("{result:?}") };
    assert!(matches!(lock, Error::Lost(LostReason::SessionEnded)), "{lock:?}");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        locks.with_lock(&never(), "commit-k", || -> Result<(), Error> {
            kill();
            panic!("mine")
        })
    }));
    assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"mine"));
    locks.with_lock(&never(), "commit-k", || Ok::<_, Error>(())).unwrap();
}

#[test]
fn shared_closures_run_together_and_keep_exclusive_ones_out() {
    let locks = locker("shared-scope", LockConfig::new());
    let none = locks.with_lock_shared(&never(), "sh-k", || {
        let both = locks.try_with_lock_shared("sh-k", || Ok::<_, Error>(1))?;
        assert_eq!(both, Some(1));
        locks.try_with_lock("sh-k", || Ok::<_, Error>(2))
    });
    assert_eq!(none.unwrap(), None);
}

#[test]
fn waiters_are_served_in_the_order_of_their_requests() {
    let locks = &locker("order", LockConfig::new());
    let order = &Mutex::new(Vec::new());
    let client = &mut server().client();
    thread::scope(|scope| {
        locks
            .with_lock(&never(), "order-k", || {
                for i in 0..6 {
                    scope.spawn(move || {
                        let note = || {
                            order.lock().unwrap().push(i);
                            Ok::<_, Error>(())
                        };
                        locks.with_lock(&never(), "order-k", note).unwrap();
                    });
                    until("it waits", || waiters(client, "order-k") == i + 1);
                }
                Ok::<_, Error>(())
            })
            .unwrap();
    });
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn ten_cancelled_waiters_leave_the_queue_within_its_bound() {
    let locks = &locker("ghosts", LockConfig::new().pool_size(11));
    let mut client = server().client();
    let cancel = &CancellationToken::new();
    locks
        .with_lock(&never(), "ghosts-k", || {
            thread::scope(|scope| {
                let waiting: Vec<_> = (0..10)
                    .map(|_| {
                        scope.spawn(move || {
                            let run = || -> Result<(), Error> { panic!("a cancelled closure ran") };
                            locks.with_lock(cancel, "ghosts-k", run)
                        })
                    })
                    .collect();
                until("all wait", || waiters(&mut client, "ghosts-k") == 10);
                let start = Instant::now();
                cancel.cancel();
                for waiter in waiting {
                    let result = waiter.join().unwrap();
                    assert!(matches!(result, Err(ScopeError::Lock(Error::Cancelled))));
                }
                let took = start.elapsed();
                assert!(took < Duration::from_secs(2), "{took:?}");
                // The request reached the server before the wait ended: nothing to wait for.
                assert_eq!(waiters(&mut client, "ghosts-k"), 0);
            });
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!(queue(&mut client, "ghosts-k"), []);
    // Nobody is granted it behind our back.
    assert!(locks.try_with_lock("ghosts-k", || Ok::<_, Error>(())).unwrap().is_some());
}

#[test]
fn max_wait_bounds_the_wait_and_leaves_nothing() {
    for slice in [None, Some(Duration::from_millis(40))] {
        let wait = Duration::from_millis(200);
        let config = LockConfig::new().max_wait(Some(wait)).wait_slice(slice);
        let locks = locker("max-wait", config);
        let mut client = server().client();
        locks.ping().unwrap();
        locks
            .with_lock(&never(), "max-wait-k", || {
                let start = Instant::now();
                let run = || -> Result<(), Error> { panic!("it ran under a lock of another") };
                let result = locks.with_lock(&never(), "max-wait-k", run);
                let took = start.elapsed();
                assert!(matches!(result, Err(ScopeError::Lock(Error::NotAcquired))), "{result:?}");
                assert!(took >= wait && took < wait + Duration::from_millis(200), "{took:?}");
                assert_eq!(queue(&mut client, "max-wait-k").len(), 1);
                Ok::<_, Error>(())
            })
            .unwrap();
        assert_eq!(queue(&mut client, "max-wait-k"), []);
    }
}

#[test]
fn a_used_up_pool_is_contention_and_a_wait_for_it_can_be_cancelled() {
    let config = LockConfig::new().pool_size(1);
    let locks = &locker("used-up", config.clone().conn_wait_timeout(None));
    let cancel = &CancellationToken::new();
    let brief = ScopedLocker::new(
        server().config(),
        config.conn_wait_timeout(Some(Duration::from_millis(50))),
    )
    .unwrap();
    locks
        .with_lock(&never(), "used-up-1", || {
            thread::scope(|scope| {
                let run = || -> Result<(), Error> { panic!("it ran") };
                let waiter = scope.spawn(move || locks.with_lock(cancel, "used-up-2", run));
                cancel.cancel();
                let result = waiter.join().unwrap();
                assert!(matches!(result, Err(ScopeError::Lock(Error::Cancelled))));
            });
            Ok::<_, Error>(())
        })
        .unwrap();
    until("the pool has its session", || brief.ping().is_ok());
    let outer = brief.with_lock(&never(), "used-up-1", || {
        let inner = brief.try_with_lock("used-up-2", || Ok::<_, Error>(()));
        assert!(matches!(inner, Ok(None)), "{inner:?}");
        Ok::<_, Error>(())
    });
    outer.unwrap();
}

#[test]
fn a_waiter_in_slices_gives_its_snapshot_up_in_between() {
    let slice = Duration::from_millis(50);
    let locks = &locker("slices", LockConfig::new().wait_slice(Some(slice)));
    let (mut client, cancel) = (server().client(), &CancellationToken::new());
    locks
        .with_lock(&never(), "slices-k", || {
            thread::scope(|scope| {
                let waiter =
                    scope.spawn(move || locks.with_lock(cancel, "slices-k", || Ok::<_, Error>(())));
                let sql = "SELECT xact_start::text FROM pg_stat_activity \
                           WHERE application_name = 'slices' AND wait_event_type = 'Lock'";
                let mut starts = std::collections::HashSet::new();
                until("three slices", || {
                    starts.extend(
                        client.query(sql, &[]).unwrap().iter().map(|row| row.get::<_, String>(0)),
                    );
                    starts.len() >= 3
                });
                cancel.cancel();
                assert!(waiter.join().unwrap().is_err());
            });
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!(queue(&mut client, "slices-k"), []);
}

#[test]
fn a_closed_locker_refuses_and_lets_closures_finish() {
    let locks = locker("closed", LockConfig::new());
    let result = locks.with_lock(&never(), "closed-k", || {
        locks.close();
        Ok::<_, Error>(7)
    });
    assert_eq!(result.unwrap(), 7);
    let result = locks.try_with_lock("closed-k", || Ok::<_, Error>(()));
    assert!(matches!(result, Err(ScopeError::Lock(Error::Closed))));
    assert!(matches!(locks.ping(), Err(Error::Closed)));
}
