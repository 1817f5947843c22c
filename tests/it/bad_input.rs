//! Names and options that cannot be, or that only look so.

use std::time::{Duration, Instant};

use leasehold::{
    CancellationToken, Error, Event, Key, Lease, Locker, Options, RunError, SessionTtl,
};

use crate::support::leases::{NAME, Recorder, fast, locker};
use crate::support::{Server, look};

#[test]
fn an_empty_name_is_refused_everywhere() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let cancel = CancellationToken::new();
    let job = |_: &Lease| Ok::<(), ()>(());
    assert!(matches!(locker.run(&cancel, "", job), Err(RunError::Lock(Error::EmptyName))));
    assert!(matches!(locker.try_run(&cancel, "", job), Err(RunError::Lock(Error::EmptyName))));
    assert!(matches!(locker.try_acquire(""), Err(Error::EmptyName)));
    assert!(matches!(locker.acquire_timeout("", Duration::ZERO), Err(Error::EmptyName)));
    assert!(matches!(locker.holder(""), Err(Error::EmptyName)));
    assert!(matches!(locker.step_down(""), Err(Error::EmptyName)));
}

#[test]
fn names_of_any_characters_and_length_are_leases_of_their_own() {
    let server = Server::start();
    let recorder = Recorder::new();
    let (a, b) = (locker(&server, recorder.attach(fast())), locker(&server, fast()));
    let long = "x".repeat(1 << 20);
    let names = ["with\0nul", "日本", "o'; DROP TABLE x; --", " ", "\n", "🦀", &long];
    let guards: Vec<_> = names.iter().map(|name| a.try_acquire(name).unwrap().unwrap()).collect();
    for (name, guard) in names.iter().zip(&guards) {
        assert_eq!(guard.name(), *name);
        assert!(b.try_acquire(name).unwrap().is_none());
        assert!(b.holder(name).unwrap().is_some());
    }
    assert_eq!(look::advisory_locks(&mut server.client()).len(), names.len());
    drop(guards);
    let (_, event) = recorder
        .wait_for_nth("all released", names.len(), |event| matches!(event, Event::Released { .. }));
    let longest = recorder.events().iter().map(|event| event.to_string().len()).max().unwrap();
    assert!(longest < 300, "the log stays readable: {event}");
}

#[test]
fn the_key_in_sql_is_the_key_in_rust() {
    let server = Server::start();
    let mut client = server.client();
    let sql = include_str!("../../src/key.sql");
    for namespace in [0, 1, -1, 42, i32::MIN, i32::MAX, leasehold::LEASE_NAMESPACE] {
        for name in ["k", "chore", "nightly-compaction", "日本", "", "a b\n\"'", "🦀"] {
            let key: i64 = client.query_one(sql, &[&namespace, &name]).unwrap().get(0);
            assert_eq!(key, Key::new(namespace, name).as_i64(), "({namespace}, {name:?})");
        }
    }
}

#[test]
fn a_namespace_keeps_names_apart() {
    let server = Server::start();
    let (a, b) = (locker(&server, fast()), locker(&server, fast().namespace(7)));
    let ours = a.try_acquire(NAME).unwrap().unwrap();
    let theirs = b.try_acquire(NAME).unwrap().unwrap();
    assert_ne!(ours.key(), theirs.key());
    assert_eq!(theirs.key(), Key::new(7, NAME));
}

#[test]
fn options_that_cannot_work_are_refused_before_anything_is_started() {
    let refused = |options: Options| {
        let start = Instant::now();
        let mut config = leasehold::postgres::Config::new();
        let outcome = Locker::new(config.host("127.0.0.1").clone(), options);
        assert!(start.elapsed() < Duration::from_millis(50));
        match outcome {
            Err(error @ Error::InvalidOption(_)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(fast().retry_interval(Duration::ZERO)).contains("retry_interval"));
    assert!(refused(fast().heartbeat_interval(Duration::ZERO)).contains("heartbeat_interval"));
    assert!(refused(fast().query_timeout(Duration::MAX)).contains("query_timeout"));
    let ttl = SessionTtl::Fixed(Duration::from_secs(1));
    let text = refused(fast().session_ttl(ttl));
    assert!(text.contains("session_ttl > heartbeat_interval + query_timeout"), "{text}");
}
