//! `try_acquire`, `acquire_timeout`, `try_run` and `holder`: outcomes, bounds, nothing left behind.

use std::time::{Duration, Instant};

use leasehold::{CancellationToken, Error, Event, Lease, LostReason, Options, RunError};

use crate::support::leases::{NAME, PATIENCE, Recorder, fast, in_thread, locker};
use crate::support::{Server, look};

#[test]
fn a_lease_is_had_once_and_again_after_its_release() {
    let server = Server::start();
    let (a, b) = (locker(&server, fast()), locker(&server, fast()));
    let guard = a.try_acquire(NAME).unwrap().unwrap();
    assert_eq!((guard.name(), guard.key().as_i64()), (NAME, leasehold::key(NAME)));
    assert!(guard.is_held() && guard.check().is_ok());
    assert!(guard.remaining() <= Duration::from_millis(1200));
    assert!(b.try_acquire(NAME).unwrap().is_none());
    assert!(matches!(a.try_acquire(NAME), Err(Error::AlreadyRunning)));
    guard.release().unwrap();
    let next = b.try_acquire(NAME).unwrap().unwrap();
    drop(next);
    // Dropping does not wait, but what is asked for next comes after the release.
    assert!(b.try_acquire(NAME).unwrap().is_some());
}

#[test]
fn tokens_of_a_name_grow() {
    let server = Server::start();
    let lockers = [locker(&server, fast()), locker(&server, fast())];
    let mut last = None;
    for round in 0..200 {
        let guard = lockers[round % 2].acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
        assert!(last.is_none_or(|last| guard.token() > last));
        last = Some(guard.token());
        guard.release().unwrap();
    }
}

#[test]
fn a_wait_is_honoured_within_50_ms_from_zero_to_days() {
    let server = Server::start();
    let (a, b) = (locker(&server, Options::new()), locker(&server, Options::new()));
    let guard = a.try_acquire(NAME).unwrap().unwrap();
    b.ping().unwrap();
    for millis in [0, 1, 50, 700] {
        let wait = Duration::from_millis(millis);
        let start = Instant::now();
        let outcome = b.acquire_timeout(NAME, wait);
        let took = start.elapsed();
        assert!(took >= wait && took < wait + Duration::from_millis(50), "{took:?} for {wait:?}");
        // A wait shorter than a round trip may end without an answer.
        let unanswered = matches!(outcome, Err(Error::Timeout(_))) && millis == 1;
        assert!(unanswered || outcome.unwrap().is_none());
    }
    drop(guard);
}

#[test]
fn a_wait_of_days_ends_with_the_release_and_a_wait_for_ever_with_a_close() {
    let server = Server::start();
    let events = Recorder::new();
    let (a, b) = (locker(&server, fast()), locker(&server, events.attach(fast())));
    let wait = |round: usize, time: Duration| {
        let b = b.clone();
        let waiter = in_thread(move || b.acquire_timeout(NAME, time).map(|lease| lease.is_some()));
        events.wait_for_nth("waiting", round, |event| matches!(event, Event::Waiting { .. }));
        waiter
    };
    let guard = a.try_acquire(NAME).unwrap().unwrap();
    let waiter = wait(1, Duration::from_secs(86_400 * 30));
    guard.release().unwrap();
    assert!(waiter.join().unwrap().unwrap());
    let _guard = a.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
    let waiter = wait(2, Duration::MAX);
    b.close();
    assert!(matches!(waiter.join().unwrap(), Err(Error::Closed)));
}

#[test]
fn a_release_wakes_a_waiter_at_once() {
    let server = Server::start();
    // The defaults: a poll would take five seconds.
    let events = Recorder::new();
    let (a, b) = (locker(&server, Options::new()), locker(&server, events.attach(Options::new())));
    let mut took = Vec::new();
    for round in 0..20 {
        let guard = a.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
        let waiter = {
            let b = b.clone();
            in_thread(move || {
                let guard = b.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
                let at = Instant::now();
                guard.release().unwrap();
                at
            })
        };
        events.wait_for_nth("waiting", round + 1, |event| matches!(event, Event::Waiting { .. }));
        let start = Instant::now();
        guard.release().unwrap();
        took.push(waiter.join().unwrap() - start);
    }
    took.sort();
    assert!(took[18] < Duration::from_millis(50), "{took:?}");
}

#[test]
fn try_run_gives_the_jobs_value_or_none_or_its_error() {
    let server = Server::start();
    let (a, b) = (locker(&server, fast()), locker(&server, fast()));
    let cancel = CancellationToken::new();
    let value = a.try_run(&cancel, NAME, |lease: &Lease| {
        let elsewhere = b.try_run(&cancel, lease.name(), |_: &Lease| -> Result<(), ()> {
            panic!("two jobs at a time")
        });
        assert!(matches!(elsewhere, Ok(None)));
        Ok::<_, ()>(7)
    });
    assert!(matches!(value, Ok(Some(7))));
    let error = b.try_run(&cancel, NAME, |_: &Lease| Err::<(), _>("jammed"));
    assert!(matches!(error, Err(RunError::Job("jammed"))));
    cancel.cancel();
    let cancelled = a.try_run(&cancel, NAME, |_: &Lease| Ok::<_, ()>(()));
    assert!(matches!(cancelled, Err(RunError::Lock(Error::Cancelled))));
    assert!(look::advisory_locks(&mut server.client()).is_empty());
}

#[test]
fn try_run_says_so_when_the_lease_was_lost_whatever_the_job_returned() {
    let server = Server::start();
    let locker = locker(&server, fast());
    for value in [Ok(1), Err("because of the loss")] {
        let outcome = locker.try_run(&CancellationToken::new(), NAME, |lease: &Lease| {
            server.terminate(look::holder_pid(&mut server.client(), lease.key().as_i64()).unwrap());
            assert!(lease.wait_timeout(PATIENCE));
            value
        });
        let lost = matches!(outcome, Err(RunError::Lock(Error::Lost(LostReason::SessionEnded))));
        assert!(lost, "{outcome:?}");
    }
}

#[test]
fn a_caller_that_went_away_leaves_no_lease_behind() {
    let server = Server::start();
    let (a, b) = (locker(&server, fast()), locker(&server, fast()));
    a.ping().unwrap();
    let pid = look::sessions(&mut server.client(), "leasehold")[0].pid;
    let other = b.try_acquire("other").unwrap().unwrap();
    server.freeze_backend(pid);
    // The caller gives up before the answer comes; the answer is a grant.
    let outcome = a.acquire_timeout(NAME, Duration::from_millis(200));
    assert!(matches!(outcome, Err(Error::Timeout(_))), "{outcome:?}");
    server.thaw_backend(pid);
    let took = look::wait_until("another can have it", PATIENCE, || {
        b.try_acquire(NAME).unwrap().is_some()
    });
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(other.is_held());
    look::wait_until("nothing is left", PATIENCE, || {
        let locks = look::advisory_locks(&mut server.client());
        locks.iter().all(|lock| lock.key == leasehold::key("other"))
    });
}

#[test]
fn holder_is_seen_from_anywhere_by_a_role_with_no_privileges() {
    let server = Server::start();
    server.execute("CREATE ROLE plain LOGIN");
    let holding = locker(&server, fast().application_name("billing"));
    let looking = locker(&server, fast());
    let mut config = server.config();
    let plain = leasehold::Locker::new(config.user("plain").clone(), fast()).unwrap();
    assert_eq!(looking.holder(NAME).unwrap(), None);
    let guard = holding.try_acquire(NAME).unwrap().unwrap();
    let pid = look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap();
    let seen = looking.holder(NAME).unwrap().unwrap();
    assert_eq!(seen.pid, pid);
    assert_eq!(seen.application_name.as_deref(), Some("billing"));
    assert_eq!(seen.client_addr.as_deref(), Some("127.0.0.1"));
    assert!(seen.session_since.unwrap().elapsed().unwrap() < PATIENCE);
    let hidden = plain.holder(NAME).unwrap().unwrap();
    assert_eq!((hidden.pid, hidden.client_addr, hidden.session_since), (pid, None, None));
    assert!(plain.try_acquire("own").unwrap().is_some(), "CONNECT is all that a lease needs");
    assert!(matches!(plain.holder(""), Err(Error::EmptyName)));
}

#[test]
fn a_thousand_leases_are_one_session_one_heartbeat_and_no_thread_each() {
    let server = Server::builder().conf("log_statement", "all").start();
    let locker = locker(&server, fast().application_name("many"));
    locker.ping().unwrap();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let own = || {
        let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("leasehold-")).count()
    };
    let before = (threads(), own());
    let guards: Vec<_> =
        (0..1000).map(|n| locker.try_acquire(&format!("n{n}")).unwrap().unwrap()).collect();
    // Other tests of this process start and end threads, too; a thousand would be seen.
    assert!(own() < before.1 + 100 && threads() < before.0 + 500);
    assert_eq!(look::sessions(&mut server.client(), "many").len(), 1);
    let log = server.log_during(|| {
        std::thread::sleep(Duration::from_secs(2));
    });
    let heartbeats = log.lines().filter(|line| line.contains("/* leasehold ")).count();
    assert!((7..=12).contains(&heartbeats), "{heartbeats} statements in 2 s at one per 200 ms");
    assert!(guards.iter().all(|guard| guard.is_held()));
    let start = Instant::now();
    drop(guards);
    look::wait_until("all are released", PATIENCE, || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn ten_thousand_timed_waits_under_contention_leave_no_lock_behind() {
    let server = Server::start();
    let won = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for contender in 0..4_u64 {
            let locker = locker(&server, fast());
            let won = &won;
            scope.spawn(move || {
                for round in 0..2500 {
                    // From less than a round trip to several.
                    let wait = Duration::from_micros(100 + (round * 7 + contender * 131) % 1500);
                    if let Ok(Some(guard)) = locker.acquire_timeout(NAME, wait) {
                        won.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        drop(guard);
                    }
                }
                locker.ping().unwrap();
            });
        }
    });
    assert!(won.into_inner() > 100);
    look::wait_until("nothing is left", PATIENCE, || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
}
