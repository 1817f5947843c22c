//! Standbys cost next to nothing: no snapshot, one statement per retry interval, no storm.

use std::time::{Duration, Instant};

use leasehold::{CancellationToken, Event, Lease, Locker, RunError};

use crate::support::leases::{NAME, PATIENCE, Recorder, fast, in_thread, locker};
use crate::support::{Child, Proxy, Server, look};

type Runner = std::thread::JoinHandle<Result<(), RunError<&'static str>>>;

/// Lockers that wait for [`NAME`], and lead until `stop` is set once they get it.
fn standbys(
    server: &Server,
    n: usize,
    watch: bool,
    recorder: &Recorder,
) -> (CancellationToken, Vec<Runner>) {
    let stop = CancellationToken::new();
    let runners = (0..n)
        .map(|_| {
            let options = fast().watch(watch).application_name("standby");
            let locker = locker(server, recorder.attach(options));
            let stop = stop.clone();
            in_thread(move || {
                locker.run(&stop, NAME, |lease: &Lease| {
                    lease.cancellation().wait();
                    Ok(())
                })
            })
        })
        .collect();
    recorder.wait_for_nth("all wait", n, |event| matches!(event, Event::Waiting { .. }));
    (stop, runners)
}

fn join(stop: &CancellationToken, runners: Vec<Runner>) {
    stop.cancel();
    for runner in runners {
        assert!(runner.join().unwrap().is_ok());
    }
}

/// With 20 standbys waiting, an index is built concurrently about as fast as without.
fn an_index_is_built_concurrently(watch: bool, bound: Duration) {
    let server = Server::start();
    server.execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS n");
    let holder = locker(&server, fast());
    let _guard = holder.try_acquire(NAME).unwrap().unwrap();
    let (stop, runners) = standbys(&server, 20, watch, &Recorder::new());
    let mut took = Vec::new();
    for _ in 0..3 {
        let start = Instant::now();
        server.execute("CREATE INDEX CONCURRENTLY i ON t (n)");
        took.push(start.elapsed());
        server.execute("DROP INDEX i");
    }
    assert!(took.iter().all(|took| *took < bound), "{took:?}");
    join(&stop, runners);
}

#[test]
fn waiting_standbys_do_not_hold_up_a_concurrent_index_build() {
    an_index_is_built_concurrently(false, Duration::from_secs(1));
}

#[test]
fn watching_standbys_hold_up_a_concurrent_index_build_for_slices_only() {
    an_index_is_built_concurrently(true, Duration::from_secs(3));
}

#[test]
fn waiting_standbys_are_idle_and_hold_no_snapshot() {
    let server = Server::start();
    let holder = locker(&server, fast().application_name("standby"));
    let _guard = holder.try_acquire(NAME).unwrap().unwrap();
    let (stop, runners) = standbys(&server, 20, false, &Recorder::new());
    let (mut looks, mut busy, mut pinned) = (0, 0, 0);
    let mut eye = server.client();
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        let sessions = look::sessions(&mut eye, "standby");
        assert_eq!(sessions.len(), 21, "one session each");
        looks += sessions.len();
        busy += sessions.iter().filter(|session| session.state != "idle").count();
        pinned += sessions.iter().filter(|session| session.backend_xmin.is_some()).count();
        assert!(sessions.iter().all(|session| session.state != "idle in transaction"));
    }
    // A look may meet one in the middle of a statement; none stays there.
    assert!(busy * 20 < looks && pinned * 20 < looks, "{busy} busy, {pinned} pinned of {looks}");
    join(&stop, runners);
}

#[test]
fn a_watching_standby_never_holds_a_snapshot_for_longer_than_a_slice() {
    let server = Server::start();
    let holder = locker(&server, fast());
    let _guard = holder.try_acquire(NAME).unwrap().unwrap();
    let (stop, runners) = standbys(&server, 1, true, &Recorder::new());
    let mut eye = server.client();
    look::wait_until("it watches", PATIENCE, || {
        let sessions = look::sessions(&mut eye, "standby");
        sessions.iter().any(|session| session.query.starts_with("/* leasehold watch"))
    });
    assert_eq!(look::sessions(&mut eye, "standby").len(), 2, "one session more");
    let (mut since, mut oldest) = (None, Duration::ZERO);
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        let sessions = look::sessions(&mut eye, "standby");
        let xmin = sessions.into_iter().filter(|session| session.backend_xmin.is_some());
        // Of one statement, as its session and its start tell.
        let now = xmin.map(|session| session.query_start).max();
        match (since, now) {
            (Some((start, first)), Some(now)) if start == now => {
                oldest = oldest.max(Instant::now().duration_since(first));
            }
            (_, Some(now)) => since = Some((now, Instant::now())),
            (_, None) => since = None,
        }
    }
    assert!(oldest > Duration::from_millis(200), "it was watched: {oldest:?}");
    assert!(oldest < Duration::from_millis(500), "{oldest:?}");
    join(&stop, runners);
}

#[test]
fn a_standby_sends_one_statement_per_retry_however_many_names() {
    let server = Server::builder().conf("log_statement", "all").start();
    let holder = locker(&server, fast());
    let names: Vec<String> = (0..50).map(|n| format!("n{n}")).collect();
    let _guards: Vec<_> =
        names.iter().map(|name| holder.try_acquire(name).unwrap().unwrap()).collect();
    let recorder = Recorder::new();
    let standby = locker(&server, recorder.attach(fast().application_name("fifty")));
    let stop = CancellationToken::new();
    let runners: Vec<_> = names
        .into_iter()
        .map(|name| {
            let (standby, stop) = (standby.clone(), stop.clone());
            in_thread(move || standby.run(&stop, &name, |_: &Lease| Err::<(), _>("led")))
        })
        .collect();
    recorder.wait_for_nth("all wait", 50, |event| matches!(event, Event::Waiting { .. }));
    let log = server.log_during(|| std::thread::sleep(Duration::from_secs(2)));
    let statements = log
        .lines()
        .filter(|line| line.contains(" fifty ") && line.contains("/* leasehold "))
        .count();
    assert!((7..=11).contains(&statements), "{statements} in 2 s at one per 200 to 240 ms");
    stop.cancel();
    for runner in runners {
        assert!(runner.join().unwrap().is_ok());
    }
}

/// `kill -9` of the holder: the standby leads within `bound`.
fn a_killed_holder_is_replaced(watch: bool, rounds: usize, bound: Duration) {
    let server = Server::start();
    let url = server.url();
    let mut took = Vec::new();
    for _ in 0..rounds {
        let mut holder = Child::spawn("leader", &[("URL", &url)]);
        holder.expect("leads", PATIENCE);
        let recorder = Recorder::new();
        let (stop, runners) = standbys(&server, 1, watch, &recorder);
        if watch {
            look::wait_until("it watches", PATIENCE, || {
                let sessions = look::sessions(&mut server.client(), "standby");
                sessions.iter().any(|session| session.query.starts_with("/* leasehold watch"))
            });
        }
        let start = Instant::now();
        holder.kill9();
        let (at, _) =
            recorder.wait_for_nth("a term", 1, |event| matches!(event, Event::Acquired { .. }));
        took.push(at - start);
        join(&stop, runners);
    }
    took.sort();
    assert!(took[took.len() * 9 / 10] < bound, "{took:?}");
}

#[test]
fn a_killed_holder_is_replaced_at_the_next_try() {
    // R and a fifth, and what the server takes to notice.
    a_killed_holder_is_replaced(false, 8, Duration::from_millis(240 + 60));
}

#[test]
fn a_killed_holder_is_replaced_at_once_by_a_watching_standby() {
    a_killed_holder_is_replaced(true, 20, Duration::from_millis(50));
}

#[test]
fn of_fifty_standbys_one_wins_the_others_wait_and_there_is_no_storm() {
    for watch in [false, true] {
        let server =
            Server::builder().conf("log_statement", "all").conf("max_connections", "200").start();
        let mut holder = Child::spawn("leader", &[("URL", &server.url())]);
        holder.expect("leads", PATIENCE);
        let recorder = Recorder::new();
        let (stop, runners) = standbys(&server, 50, watch, &recorder);
        let log = server.log_during(|| {
            holder.kill9();
            recorder.wait_for("a term", |event| matches!(event, Event::Acquired { .. }));
            std::thread::sleep(Duration::from_secs(1));
        });
        assert_eq!(recorder.count(|event| matches!(event, Event::Acquired { .. })), 1);
        let tries = log.lines().filter(|line| line.contains("/* leasehold try_lock")).count();
        // Per standby: one try each 200 ms for a good second, and one because of the death.
        assert!(tries < 50 * 9, "{tries} tries of 50 standbys");
        join(&stop, runners);
    }
}

#[test]
fn a_blocked_notification_costs_a_retry_interval_and_no_more() {
    let server = Server::start();
    let recorder = Recorder::new();
    let holder = locker(&server, fast());
    let guard = holder.try_acquire(NAME).unwrap().unwrap();
    let (stop, runners) = standbys(&server, 1, false, &recorder);
    // A listener in an open transaction keeps its notifications; ours are delivered all the same.
    let mut slow = server.client();
    slow.batch_execute("LISTEN leasehold; BEGIN; SELECT 1").unwrap();
    let start = Instant::now();
    guard.release().unwrap();
    recorder.wait_for("a term", |event| matches!(event, Event::Acquired { .. }));
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
    slow.batch_execute("COMMIT").unwrap();
    join(&stop, runners);
}

#[test]
fn foreign_messages_on_the_channel_are_ignored() {
    let server = Server::start();
    let recorder = Recorder::new();
    let locker = Locker::new(server.config(), recorder.attach(fast())).unwrap();
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    for message in ["", "r", "rx", "r1", "s", "s1", "sx y", "a", "é", "r99999999999999999999"] {
        server.client().execute("SELECT pg_notify('leasehold', $1)", &[&message]).unwrap();
    }
    let step_down = format!("s{} f00", guard.key());
    server.client().execute("SELECT pg_notify('leasehold', $1)", &[&step_down]).unwrap();
    locker.ping().unwrap();
    assert!(guard.is_held() && guard.check().is_ok(), "it does not allow to be asked");
    assert_eq!(recorder.count(|event| matches!(event, Event::SessionLost { .. })), 0);
}

#[test]
fn where_notifications_are_accepted_and_not_delivered_standbys_poll_and_say_so() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    proxy.deafen();
    let holder = locker(&server, fast());
    let guard = holder.try_acquire(NAME).unwrap().unwrap();
    let recorder = Recorder::new();
    let standby = Locker::new(proxy.config(), recorder.attach(fast())).unwrap();
    let waiter = in_thread(move || standby.acquire_timeout(NAME, PATIENCE).unwrap().unwrap());
    recorder.wait_for("it is told", |event| matches!(event, Event::NotifyUnavailable { .. }));
    recorder.wait_for("it waits", |event| matches!(event, Event::Waiting { .. }));
    let start = Instant::now();
    guard.release().unwrap();
    let won = waiter.join().unwrap();
    // R and a fifth, and a busy machine.
    assert!(start.elapsed() < Duration::from_millis(240 + 100), "{:?}", start.elapsed());
    won.release().unwrap();
}
