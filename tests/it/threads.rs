//! Threads, runtimes and forks.

use std::time::{Duration, Instant};

use leasehold::{CancellationToken, Error, Lease};

use crate::support::leases::{NAME, PATIENCE, fast, in_thread, locker};
use crate::support::{Server, look};

/// Calls every public function that may talk to the server.
fn call_everything(locker: &leasehold::Locker) {
    locker.ping().unwrap();
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    assert!(guard.is_held());
    assert!(locker.holder(NAME).unwrap().is_some());
    guard.release().unwrap();
    drop(locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap());
    assert!(!locker.step_down("nobody's").unwrap());
    let cancel = CancellationToken::new();
    locker.run(&cancel, "run", |_: &Lease| Ok::<_, ()>(())).unwrap();
    locker.try_run(&cancel, "try_run", |_: &Lease| Ok::<_, ()>(())).unwrap().unwrap();
}

#[test]
fn every_call_works_inside_an_async_runtime() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let locker = locker(&server, fast());
        call_everything(&locker);
        let inner = locker.clone();
        tokio::task::spawn_blocking(move || call_everything(&inner)).await.unwrap();
        locker.close();
        // And a drop, with a lease held.
        let dropped = self::locker(&server, fast());
        let guard = dropped.try_acquire(NAME).unwrap().unwrap();
        drop(dropped);
        drop(guard);
    });
}

#[test]
fn threads_have_names_of_the_library() {
    let server = Server::start();
    let locker = locker(&server, fast().watch(true));
    let job = |_: &Lease| -> Result<Option<String>, ()> {
        Ok(std::thread::current().name().map(str::to_owned))
    };
    let name = locker.try_run(&CancellationToken::new(), NAME, job).unwrap().unwrap();
    assert_eq!(name.as_deref(), Some("leasehold-job"));
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names: Vec<String> = tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    for expected in ["leasehold-owner", "leasehold-clock", "leasehold-event", "leasehold-watch"] {
        assert!(names.iter().any(|name| name == expected), "no {expected} in {names:?}");
    }
}

#[test]
fn a_thousand_reconnects_leave_no_thread_and_no_descriptor_behind() {
    let server = Server::start();
    let locker = locker(&server, fast().application_name("again"));
    let mut eye = server.client();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let mut before = None;
    for round in 0..1000 {
        let guard = locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
        let pid = look::holder_pid(&mut eye, guard.key().as_i64()).unwrap();
        eye.execute("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
        assert!(guard.cancellation().wait_timeout(PATIENCE));
        if round == 10 {
            before = Some((descriptors(), threads()));
        }
    }
    let (descriptors_before, threads_before) = before.unwrap();
    // Other tests of this process come and go; a leak would be near a thousand.
    assert!(descriptors() < descriptors_before + 200, "{descriptors_before} -> {}", descriptors());
    assert!(threads() < threads_before + 200, "{threads_before} -> {}", threads());
}

#[test]
fn after_a_fork_the_child_is_told_so_and_the_parent_keeps_its_lease() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let start = Instant::now();
    let verdict = crate::support::fork::in_child(|| {
        let cancel = CancellationToken::new();
        let forked = |outcome: Result<(), Error>| matches!(outcome, Err(Error::Forked));
        let mut verdict = !guard.is_held() && guard.remaining() == Duration::ZERO;
        verdict &= forked(guard.check());
        verdict &= forked(locker.ping());
        verdict &= forked(locker.try_acquire("child's").map(drop));
        verdict &= forked(locker.holder(NAME).map(drop));
        verdict &= forked(locker.close_timeout(Duration::ZERO));
        verdict &= locker.run(&cancel, "child's", |_: &Lease| Ok::<_, ()>(())).is_err();
        let locker_too = locker.clone();
        drop(locker_too);
        verdict
    });
    assert_eq!(verdict, Some(true));
    assert!(start.elapsed() < PATIENCE);
    // The child has dropped nothing of the parent's.
    assert!(guard.is_held());
    locker.ping().unwrap();
    guard.release().unwrap();
}

#[test]
fn no_request_waits_for_anything_but_the_server() {
    let server = Server::start();
    // Nothing else would wake the owner thread within this test.
    let hour = Duration::from_secs(3600);
    let options = fast().heartbeat_interval(hour).retry_interval(hour);
    let locker = locker(&server, options.query_timeout(Duration::from_secs(30)));
    let start = Instant::now();
    for round in 0..1_000 {
        let asked = Instant::now();
        locker.ping().unwrap();
        locker.try_acquire(NAME).unwrap().unwrap().release().unwrap();
        assert!(asked.elapsed() < Duration::from_secs(1), "round {round}: {:?}", asked.elapsed());
    }
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
}

#[test]
fn many_callers_share_one_session_and_each_hears_its_own_outcome() {
    let server = Server::start();
    let shared = locker(&server, fast().application_name("shared"));
    let rival = locker(&server, fast());
    let _held: Vec<_> =
        (0..4).map(|n| rival.try_acquire(&format!("held{n}")).unwrap().unwrap()).collect();
    let callers: Vec<_> = (0..8)
        .map(|n| {
            let shared = shared.clone();
            in_thread(move || {
                for round in 0..50 {
                    let free = shared.try_acquire(&format!("free{n}")).unwrap();
                    assert!(free.is_some(), "round {round}");
                    let held = shared.try_acquire(&format!("held{}", n % 4));
                    assert!(matches!(held, Ok(None) | Err(Error::AlreadyRunning)), "{held:?}");
                }
            })
        })
        .collect();
    for caller in callers {
        caller.join().unwrap();
    }
    assert_eq!(look::sessions(&mut server.client(), "shared").len(), 1);
}
