//! The harness itself: what it says of a history, and what it does to servers.

use std::time::Duration;

use leasehold::FencingToken;

use crate::support::history::{Record, overlaps, terms, tokens_out_of_order};
use crate::support::{Server, look};

fn token(n: i64) -> FencingToken {
    FencingToken::try_from((1 << 48) + n).unwrap()
}

fn record(kind: &str, n: i64, process: u32, at: u64) -> Record {
    Record { kind: kind.into(), name: "a".into(), token: token(n), process, at }
}

#[test]
fn a_clean_history_is_found_clean() {
    let records = [record("start", 1, 1, 10), record("stop", 1, 1, 20), record("start", 2, 2, 20)];
    let terms = terms(&records, &[]);
    assert!(overlaps(&terms).is_empty());
    assert!(tokens_out_of_order(&terms).is_none());
}

#[test]
fn planted_overlaps_are_found_and_measured() {
    let records = [
        record("start", 1, 1, 10),
        record("start", 2, 2, 15),
        record("stop", 1, 1, 18),
        record("stop", 2, 2, 40),
        record("start", 3, 3, 30),
        record("stop", 3, 3, 35),
    ];
    let found = overlaps(&terms(&records, &[]));
    let lengths: Vec<u128> = found.iter().map(|(overlap, ..)| overlap.as_nanos()).collect();
    assert_eq!(lengths, [5, 3], "also of a term within another");
}

#[test]
fn a_killed_process_ends_its_term() {
    let records = [record("start", 1, 1, 10), record("start", 2, 2, 50), record("stop", 2, 2, 60)];
    assert!(overlaps(&terms(&records, &[(1, 40)])).is_empty());
    let overlap = overlaps(&terms(&records, &[])).first().unwrap().0;
    assert_eq!(overlap, Duration::from_nanos(10), "a term without an end goes on");
}

#[test]
fn planted_tokens_that_go_back_or_repeat_are_found() {
    for second in [4, 5] {
        let records = [record("start", 5, 1, 10), record("start", second, 2, 20)];
        assert!(tokens_out_of_order(&terms(&records, &[])).is_some());
    }
}

#[test]
fn a_server_stops_crashes_and_starts_again_on_its_port() {
    let mut server = Server::start();
    let port = server.port();
    server.execute("CREATE TABLE kept ()");
    server.stop_fast();
    server.start_again();
    server.kill9();
    assert!(server.config().connect(leasehold::postgres::NoTls).is_err());
    server.start_again();
    server.stop_immediate();
    server.start_again();
    assert_eq!(server.port(), port);
    server.execute("TABLE kept");
}

#[test]
fn a_frozen_backend_answers_again_when_it_is_thawed() {
    let server = Server::start();
    let mut client = server.client();
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    server.freeze_backend(pid);
    let answer = std::thread::spawn(move || client.batch_execute("SELECT 1").is_ok());
    look::wait_until("others answer", Duration::from_secs(5), || {
        server.client().batch_execute("SELECT 1").is_ok()
    });
    assert!(!answer.is_finished());
    server.thaw_backend(pid);
    assert!(answer.join().unwrap());
}

#[test]
fn a_standby_streams_and_is_promoted_to_a_new_timeline() {
    let primary = Server::start();
    primary.execute("CREATE TABLE seen ()");
    let standby = primary.standby();
    look::wait_until("the standby has it", Duration::from_secs(20), || {
        standby.client().batch_execute("TABLE seen").is_ok()
    });
    standby.promote();
    let wal: String = standby
        .client()
        .query_one("SELECT pg_walfile_name(pg_current_wal_lsn())", &[])
        .unwrap()
        .get(0);
    assert!(wal.starts_with("00000002"), "{wal}");
}
