//! Tokens that never go back, and transactions that a former leader cannot commit.

use std::time::{Duration, Instant};

use leasehold::postgres::{Client, IsolationLevel, NoTls};
use leasehold::{Error, Event, FencingToken, GuardRefusal, LeaseGuard, Locker, LostReason};
use tempfile::TempDir;

use crate::support::history::{overlaps, terms, tokens_out_of_order};
use crate::support::leases::{NAME, PATIENCE, Recorder, fast, in_thread, locker};
use crate::support::{Child, History, Proxy, Server, look};

const LEVELS: [IsolationLevel; 3] =
    [IsolationLevel::ReadCommitted, IsolationLevel::RepeatableRead, IsolationLevel::Serializable];

#[test]
fn tokens_grow_over_5000_acquisitions_of_8_processes() {
    // What is asked here is order, which a slow disk does not change.
    let server = Server::builder().conf("fsync", "off").start();
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history");
    let history = History::open(&path);
    let (url, file) = (server.url(), path.to_str().unwrap().to_owned());
    let mut takers: Vec<Child> =
        (0..8).map(|_| Child::spawn("taker", &[("URL", &url), ("HISTORY", &file)])).collect();
    look::wait_until("5,000 acquisitions", Duration::from_secs(120), || {
        std::fs::metadata(&path).is_ok_and(|file| file.len() > 5_000 * 2 * 32)
            && history.read().len() > 2 * 5_000
    });
    takers.iter_mut().for_each(Child::hang_up);
    takers.iter_mut().for_each(|taker| assert!(taker.wait(PATIENCE).success()));
    let terms = terms(&history.read(), &[]);
    assert!(terms.len() >= 5_000, "{}", terms.len());
    assert_eq!(tokens_out_of_order(&terms), None);
    assert_eq!(overlaps(&terms), []);
}

#[test]
fn tokens_grow_over_50_crashes_of_the_server() {
    let mut server = Server::start();
    let locker = locker(&server, fast());
    let mut last: Option<FencingToken> = None;
    for round in 0..50 {
        // Several terms; the last is taken right before the crash.
        for _ in 0..3 {
            let guard = locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
            assert!(last.is_none_or(|last| guard.token() > last), "round {round}: {last:?}");
            last = Some(guard.token());
            if round % 2 == 0 {
                guard.release().unwrap();
            }
        }
        server.kill9();
        server.start_again();
    }
}

#[test]
fn tokens_grow_over_the_promotion_of_a_synchronous_standby() {
    let mut primary = Server::start();
    let standby = primary.standby();
    primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'");
    primary.execute("SELECT pg_reload_conf()");
    look::wait_until("the standby is synchronous", PATIENCE, || {
        let state = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        primary.client().query_one(state, &[]).unwrap().get::<_, i64>(0) == 1
    });
    let hosts = format!(
        "host=127.0.0.1,127.0.0.1 port={},{} user=postgres dbname=postgres target_session_attrs=read-write",
        primary.port(),
        standby.port()
    );
    let locker = Locker::new(hosts.parse().unwrap(), fast()).unwrap();
    let mut tokens = Vec::new();
    for _ in 0..20 {
        tokens.push(locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap().token());
    }
    primary.kill9();
    standby.promote();
    for _ in 0..20 {
        tokens.push(locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap().token());
    }
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    assert_eq!((tokens[0].timeline(), tokens[39].timeline()), (1, 2));
}

#[test]
fn a_promotion_behind_a_holders_back_ends_its_term_or_its_guard() {
    let primary = Server::start();
    let standby = primary.standby();
    let old = locker(&primary, fast());
    let old_guard = old.try_acquire(NAME).unwrap().unwrap();
    standby.promote();
    // Two primaries: no lock service can see that from one of them; tokens tell them apart.
    let new = locker(&standby, fast());
    let new_guard = new.try_acquire(NAME).unwrap().unwrap();
    assert!(new_guard.token() > old_guard.token());
    // A guard of the old term does not vouch for a transaction on the new primary.
    let mut client = standby.client();
    let mut transaction = client.transaction().unwrap();
    let outcome = old_guard.guard(&mut transaction);
    assert!(matches!(outcome, Err(Error::Guard(GuardRefusal::OtherServer))), "{outcome:?}");
}

/// A table for guarded writes.
fn table(server: &Server) {
    server.execute("CREATE TABLE writes (token int8, process text)");
}

fn written(server: &Server) -> Vec<i64> {
    let rows = server.client().query("SELECT token FROM writes", &[]).unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

fn write(transaction: &mut leasehold::postgres::Transaction<'_>, guard: &LeaseGuard) {
    let token = guard.token().as_i64();
    transaction.execute("INSERT INTO writes VALUES ($1, '')", &[&token]).unwrap();
}

fn pid(client: &mut Client) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0)
}

#[test]
fn a_guarded_transaction_commits_while_the_term_lasts_at_each_isolation_level() {
    let server = Server::start();
    table(&server);
    let locker = locker(&server, fast());
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let mut client = server.client();
    for level in LEVELS {
        let mut transaction = client.build_transaction().isolation_level(level).start().unwrap();
        guard.guard(&mut transaction).unwrap();
        // Asked again, it checks again.
        guard.guard(&mut transaction).unwrap();
        write(&mut transaction, &guard);
        transaction.commit().unwrap();
    }
    assert_eq!(written(&server), [guard.token().as_i64(); 3]);
    // The fence and the limits went with the transactions.
    assert_eq!(look::advisory_locks(&mut server.client()).len(), 1);
    let limit = "SELECT current_setting('idle_in_transaction_session_timeout')";
    assert_eq!(client.query_one(limit, &[]).unwrap().get::<_, String>(0), "0");
}

#[test]
fn a_guard_is_refused_by_the_server_when_the_holder_has_not_noticed_its_loss() {
    let server = Server::start();
    table(&server);
    let proxy = Proxy::to(&server);
    for level in LEVELS {
        let locker = Locker::new(proxy.config(), fast()).unwrap();
        let guard = locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
        let mut client = server.client();
        let mut transaction = client.build_transaction().isolation_level(level).start().unwrap();
        // A snapshot in which the term is in order.
        transaction.batch_execute("SELECT count(*) FROM writes").unwrap();
        proxy.stall();
        server.terminate(look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap());
        let successor = self::locker(&server, fast());
        let next = successor.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
        assert!(guard.is_held(), "it cannot know yet");
        let outcome = guard.guard(&mut transaction);
        assert!(matches!(outcome, Err(Error::Lost(LostReason::NotOwner))), "{outcome:?}");
        proxy.resume();
        drop(transaction);
        next.release().unwrap();
        drop(guard);
    }
    assert!(written(&server).is_empty());
}

#[test]
fn a_new_term_waits_for_the_guarded_transaction_of_the_old_one_and_starts_after_it() {
    let server = Server::start();
    table(&server);
    let recorder = Recorder::new();
    let old = locker(&server, fast());
    let patient = recorder.attach(fast().query_timeout(Duration::from_secs(20)));
    let new = locker(&server, patient);
    let guard = old.try_acquire(NAME).unwrap().unwrap();
    let mut client = server.client();
    let holder = pid(&mut client);
    let mut transaction = client.transaction().unwrap();
    guard.guard(&mut transaction).unwrap();
    write(&mut transaction, &guard);
    server.terminate(look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap());
    let successor = in_thread(move || {
        let guard = new.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
        (Instant::now(), guard)
    });
    let event = recorder.wait_for("it waits", |event| matches!(event, Event::Fenced { .. }));
    assert!(matches!(&event, Event::Fenced { pids, .. } if *pids == [holder]), "{event}");
    let before = Instant::now();
    transaction.commit().unwrap();
    let committed = Instant::now();
    let (started, next) = successor.join().unwrap();
    assert!(started >= before && started < committed + Duration::from_millis(100));
    assert!(next.token() > guard.token());
    assert_eq!(written(&server), [guard.token().as_i64()]);
}

#[test]
fn a_guarded_transaction_left_open_is_ended_after_half_the_query_time_out() {
    let server = Server::start();
    table(&server);
    let (old, new) = (locker(&server, fast()), locker(&server, fast()));
    let guard = old.try_acquire(NAME).unwrap().unwrap();
    let mut client = server.client();
    let mut transaction = client.transaction().unwrap();
    guard.guard(&mut transaction).unwrap();
    write(&mut transaction, &guard);
    server.terminate(look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap());
    let start = Instant::now();
    let next = new.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
    let took = start.elapsed();
    assert!(took > Duration::from_millis(400) && took < Duration::from_millis(1000), "{took:?}");
    assert!(transaction.commit().is_err());
    assert!(written(&server).is_empty());
    drop(next);
}

#[test]
fn a_waiting_term_can_be_withdrawn_and_leaves_nothing() {
    let server = Server::start();
    let (old, new) = (locker(&server, fast()), locker(&server, fast()));
    let guard = old.try_acquire(NAME).unwrap().unwrap();
    let mut client = server.client();
    let mut transaction = client.transaction().unwrap();
    guard.guard(&mut transaction).unwrap();
    server.terminate(look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap());
    let outcome = new.acquire_timeout(NAME, Duration::from_millis(300));
    assert!(
        outcome.as_ref().is_err() || outcome.as_ref().is_ok_and(Option::is_none),
        "{outcome:?}"
    );
    transaction.rollback().unwrap();
    look::wait_until("nothing is held", PATIENCE, || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
}

#[test]
fn a_caller_that_gave_up_on_a_busy_fence_leaves_the_name_to_the_next() {
    let server = Server::start();
    table(&server);
    server.execute("CREATE ROLE plain LOGIN");
    // The guarded transaction may be idle for long, and the next leader's role may not end it.
    let old = locker(&server, fast().query_timeout(Duration::from_secs(30)));
    let mut config = server.config();
    let recorder = Recorder::new();
    let config = config.user("plain").clone();
    let next = leasehold::Locker::new(config, recorder.attach(fast())).unwrap();
    let guard = old.try_acquire(NAME).unwrap().unwrap();
    let mut client = server.client();
    let mut transaction = client.transaction().unwrap();
    guard.guard(&mut transaction).unwrap();
    write(&mut transaction, &guard);
    guard.release().unwrap();

    let outcome = next.try_acquire(NAME);
    assert!(matches!(outcome, Err(Error::Timeout(_))), "{outcome:?}");
    let key = leasehold::key(NAME);
    let (told, heard) = crossbeam_channel::unbounded();
    let stop = leasehold::CancellationToken::new();
    let runner = {
        let stop = stop.clone();
        in_thread(move || {
            next.run(&stop, NAME, |lease: &leasehold::Lease| -> Result<(), ()> {
                told.send("begun").unwrap();
                assert!(lease.wait_timeout(PATIENCE));
                told.send(if lease.is_held() { "told" } else { "lost" }).unwrap();
                Ok(())
            })
        })
    };
    recorder.wait_for_nth("it waits", 2, |event| matches!(event, Event::Fenced { .. }));
    transaction.rollback().unwrap();
    assert_eq!(heard.recv_timeout(PATIENCE), Ok("begun"));
    // A release of the term that nobody took must not take this one out of sight.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(
        look::advisory_locks(&mut server.client()).iter().filter(|l| l.key == key).count(),
        1
    );
    server.terminate(look::holder_pid(&mut server.client(), key).unwrap());
    assert_eq!(heard.recv_timeout(Duration::from_millis(500)), Ok("lost"), "P2");
    assert_eq!(heard.recv_timeout(PATIENCE), Ok("begun"));
    stop.cancel();
    assert_eq!(heard.recv_timeout(PATIENCE), Ok("told"));
    assert!(runner.join().unwrap().is_ok());
    assert_eq!(look::holder_pid(&mut server.client(), key), None);
}

#[test]
fn transactions_that_cannot_be_guarded_are_refused_and_say_why() {
    let (server, other) = (Server::start(), Server::start());
    server.execute("CREATE DATABASE sideways");
    table(&server);
    let locker = locker(&server, fast());
    let guard = locker.try_acquire(NAME).unwrap().unwrap();

    let mut elsewhere = server.config().dbname("sideways").connect(NoTls).unwrap();
    let outcome = guard.guard(&mut elsewhere.transaction().unwrap());
    assert!(matches!(outcome, Err(Error::Guard(GuardRefusal::OtherDatabase))), "{outcome:?}");
    assert!(outcome.unwrap_err().to_string().contains("another database"));

    let mut client = other.client();
    let outcome = guard.guard(&mut client.transaction().unwrap());
    assert!(matches!(outcome, Err(Error::Guard(GuardRefusal::OtherServer))), "{outcome:?}");

    let mut client = server.client();
    let mut read_only = client.build_transaction().read_only(true).start().unwrap();
    let outcome = guard.guard(&mut read_only);
    assert!(matches!(outcome, Err(Error::Guard(GuardRefusal::ReadOnly))), "{outcome:?}");
    drop(read_only);

    let mut aborted = client.transaction().unwrap();
    assert!(aborted.batch_execute("SELECT 1/0").is_err());
    let outcome = guard.guard(&mut aborted);
    assert!(matches!(outcome, Err(Error::Query { statement: "guard", .. })), "{outcome:?}");
    drop(aborted);

    // Released, lost: known here, without asking.
    let lost = locker.try_acquire("lost").unwrap().unwrap();
    server.terminate(look::holder_pid(&mut server.client(), lost.key().as_i64()).unwrap());
    assert!(lost.cancellation().wait_timeout(PATIENCE));
    let outcome = lost.guard(&mut client.transaction().unwrap());
    assert!(matches!(outcome, Err(Error::Lost(_))), "{outcome:?}");
    assert!(written(&server).is_empty());
}

#[test]
fn a_session_that_came_back_does_not_vouch_for_an_earlier_term() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let old = locker.try_acquire("old").unwrap().unwrap();
    server.terminate(look::holder_pid(&mut server.client(), old.key().as_i64()).unwrap());
    assert!(old.cancellation().wait_timeout(PATIENCE));
    let present = locker.try_acquire("present").unwrap().unwrap();
    let mut client = server.client();
    assert!(matches!(old.guard(&mut client.transaction().unwrap()), Err(Error::Lost(_))));
    present.guard(&mut client.transaction().unwrap()).unwrap();
}

/// 200 rounds of leaders killed, terminated or stopped while they write under guard, a successor
/// starting at once: in the order of commits, tokens never go back.
#[test]
fn no_write_of_an_older_term_commits_after_the_first_of_a_newer_one() {
    let server = Server::builder().conf("track_commit_timestamp", "on").start();
    table(&server);
    let url = server.url();
    let environment =
        [("URL", url.as_str()), ("H", "100"), ("Q", "400"), ("R", "50"), ("WATCH", "1")];
    let spawn = || Child::spawn("writer", &environment);
    let mut writers: Vec<Child> = (0..3).map(|_| spawn()).collect();
    let (mut terms, mut writes, mut refusals) = (0, 0, 0);
    for round in 0..200 {
        // Lets the leader write a few times.
        let deadline = Instant::now() + PATIENCE;
        let (mut leader, mut wrote) = (None, 0);
        while leader.is_none() || wrote < 3 {
            for (n, writer) in writers.iter().enumerate() {
                while let Some((_, line)) = writer.try_next() {
                    match line.split(' ').next() {
                        Some("leads") => (leader, wrote, terms) = (Some(n), 0, terms + 1),
                        Some("wrote") => (wrote, writes) = (wrote + 1, writes + 1),
                        Some("refused") => refusals += 1,
                        _ => {}
                    }
                }
            }
            assert!(Instant::now() < deadline, "round {round}: nobody writes");
            std::thread::sleep(Duration::from_millis(1));
        }
        let key = leasehold::key(NAME);
        let leader = leader.unwrap();
        match round % 10 {
            9 => {
                // Stopped in the middle of a transaction, let go when another leads.
                let held = look::holder_pid(&mut server.client(), key);
                writers[leader].stop();
                look::wait_until("the server lets go", PATIENCE, || {
                    look::holder_pid(&mut server.client(), key) != held
                });
                std::thread::sleep(Duration::from_millis(100));
                writers[leader].cont();
            }
            n if n % 2 == 0 => {
                writers[leader].kill9();
                writers[leader] = spawn();
            }
            _ => {
                if let Some(pid) = look::holder_pid(&mut server.client(), key) {
                    let sql = "SELECT pg_terminate_backend($1)";
                    server.client().execute(sql, &[&pid]).unwrap();
                }
            }
        }
    }
    drop(writers);
    let order = "SELECT token FROM writes ORDER BY pg_xact_commit_timestamp(xmin), token";
    let rows = server.client().query(order, &[]).unwrap();
    let tokens: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    assert!(tokens.is_sorted(), "a former leader committed after its successor");
    assert!(terms > 150 && writes > 500 && refusals > 0, "{terms} {writes} {refusals}");
}
