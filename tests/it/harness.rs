//! The harness itself: what it says of a history, and what it does to servers.

use std::io::{ErrorKind, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold::FencingToken;
use leasehold::postgres::{Client, NoTls};

use crate::support::history::{Record, overlaps, terms, tokens_out_of_order};
use crate::support::keeper::processes_in;
use crate::support::proxy::Direction;
use crate::support::{Net, PgBouncer, Proxy, Server, look};

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

const BOUND: Duration = Duration::from_secs(20);

#[test]
fn two_servers_at_once_are_two_and_neither_outlives_its_owner() {
    let servers = [Server::start(), Server::start()];
    assert_ne!(servers[0].port(), servers[1].port());
    for server in &servers {
        let folder = server.client().query_one("SHOW data_directory", &[]).unwrap();
        assert_eq!(server.data().to_str().unwrap(), folder.get::<_, String>(0));
        assert!(server.version_num() >= 130_000);
        server.freeze();
    }
    let folders = servers.each_ref().map(|server| server.data());
    assert!(folders.iter().all(|folder| processes_in(folder).len() > 3));
    drop(servers);
    for folder in folders {
        assert!(!folder.exists() && processes_in(&folder).is_empty());
    }
}

#[test]
fn a_stop_that_a_frozen_backend_holds_up_ends_too() {
    let mut server = Server::start();
    let mut client = server.client();
    let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
    server.freeze_backend(pid);
    // A fast stop waits for its backends without a bound; an immediate one kills them by itself.
    server.stop_fast();
    assert!(processes_in(&server.data()).is_empty());
    server.start_again();
    server.execute("SELECT 1");
}

/// Set in a process that starts a server only to be killed.
const VICTIM: &str = "LEASEHOLD_TEST_VICTIM";

#[test]
fn a_killed_test_process_leaves_neither_servers_nor_folders() {
    if let Ok(told) = std::env::var(VICTIM) {
        let server = Server::start();
        server.freeze();
        // Renamed, so that it is never read in parts.
        std::fs::write(format!("{told}.part"), server.data().to_str().unwrap()).unwrap();
        std::fs::rename(format!("{told}.part"), &told).unwrap();
        std::thread::sleep(BOUND * 3);
        return;
    }
    let temporary = tempfile::TempDir::new().unwrap();
    // Its own folder for temporary ones, which the servers' account may enter.
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(temporary.path(), all).unwrap();
    let told = temporary.path().join("told");
    let name = "harness::a_killed_test_process_leaves_neither_servers_nor_folders";
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(VICTIM, &told)
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    look::wait_until("the victim has a server", BOUND * 2, || told.exists());
    assert!(processes_in(temporary.path()).len() > 3);
    victim.kill().unwrap();
    victim.wait().unwrap();
    look::wait_until("everything of the victim's is gone", BOUND, || {
        let mut left = std::fs::read_dir(temporary.path()).unwrap().flatten();
        processes_in(temporary.path()).is_empty() && left.all(|entry| entry.path() == told)
    });
}

#[test]
fn what_a_session_does_and_what_it_executed_is_seen() {
    let server = Server::builder().conf("log_statement", "all").start();
    let mut seen = server.config().application_name("seen").connect(NoTls).unwrap();
    seen.batch_execute("SELECT 'seen LOG:  statement: not one'\n;").unwrap();
    seen.query("SELECT pg_advisory_lock($1)", &[&-7_i64]).unwrap();
    let mut other = server.client();
    let row = other.query_one("SELECT pg_try_advisory_lock(1, 2)", &[]).unwrap();
    assert!(row.get::<_, bool>(0));
    let sessions = look::sessions(&mut other, "seen");
    assert_eq!(look::backend_count(&mut other, "seen"), 1);
    assert_eq!((sessions[0].state.as_str(), &sessions[0].backend_xmin), ("idle", &None));
    assert_eq!(sessions[0].wait_event_type.as_deref(), Some("Client"));
    assert_eq!(look::holder_pid(&mut other, -7), Some(sessions[0].pid));
    assert_eq!(look::advisory_locks(&mut other).len(), 1, "a pair of ints is no bigint");
    assert_eq!(look::statements(&server.log(), "seen"), 2, "{}", server.log());
    assert_eq!(look::statements(&server.log(), "see"), 0);
}

#[test]
fn a_synchronous_standby_has_each_commit_and_holds_up_commits_when_it_is_frozen() {
    let primary = Server::start();
    let standby = primary.synchronous_standby();
    primary.execute("CREATE TABLE seen ()");
    standby.freeze();
    let mut writer = primary.client();
    let commit = std::thread::spawn(move || writer.batch_execute("CREATE TABLE unseen ()").is_ok());
    look::wait_until("the commit waits for the standby", BOUND, || {
        let waits = "SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        !primary.client().query(waits, &[]).unwrap().is_empty()
    });
    assert!(!commit.is_finished());
    standby.thaw();
    assert!(commit.join().unwrap());
}

/// A client whose query is answered by another thread, once it can be.
fn ask(mut client: Client) -> std::thread::JoinHandle<(bool, Client)> {
    std::thread::spawn(move || (client.batch_execute("SELECT 1").is_ok(), client))
}

#[test]
fn a_proxy_stalls_each_way_resets_and_closes() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let mut client = proxy.config().connect(NoTls).unwrap();
    for stalled in [Direction::Requests, Direction::Answers] {
        let forwarded = proxy.bytes(Direction::Requests);
        proxy.stall_only(stalled);
        let answer = ask(client);
        if stalled == Direction::Answers {
            look::wait_until("the request arrives", BOUND, || {
                proxy.bytes(Direction::Requests) > forwarded
            });
        }
        std::thread::sleep(Duration::from_millis(100));
        assert!(!answer.is_finished());
        let arrived = proxy.bytes(Direction::Requests) > forwarded;
        assert_eq!(arrived, stalled == Direction::Answers);
        proxy.resume();
        let (answered, back) = answer.join().unwrap();
        assert!(answered);
        client = back;
    }
    proxy.stall();
    let answer = ask(client);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!answer.is_finished() && proxy.connections() == 1);
    proxy.resume();
    assert!(answer.join().unwrap().0);
    look::wait_until("its client is gone", BOUND, || proxy.connections() == 0);

    let mut raw = [(); 2].map(|()| std::net::TcpStream::connect(proxy.address()).unwrap());
    look::wait_until("both are accepted", BOUND, || proxy.connections() == 2);
    proxy.reset();
    for socket in &mut raw {
        socket.set_read_timeout(Some(BOUND)).unwrap();
        let ended = socket.read(&mut [0]).unwrap_err();
        assert_eq!(ended.kind(), ErrorKind::ConnectionReset);
    }
    look::wait_until("none is left", BOUND, || proxy.connections() == 0);
    let mut raw = std::net::TcpStream::connect(proxy.address()).unwrap();
    raw.set_read_timeout(Some(BOUND)).unwrap();
    look::wait_until("it is accepted", BOUND, || proxy.connections() == 1);
    proxy.close();
    assert_eq!(raw.read(&mut [0]).unwrap(), 0, "the end, in good order");
}

/// Whether the other host gets a TCP connection within a second. Bash opens it.
fn reaches(net: &Net, server: &Server) -> bool {
    let open = format!("exec 3<>/dev/tcp/{}/{}", net.server(), server.port());
    let opened = net.command("timeout").args(["1", "bash", "-c", &open]).output().unwrap();
    opened.status.success()
}

#[test]
fn a_wire_is_cut_lossy_unplugged_and_healed() {
    let net = Net::new();
    let server = Server::builder().listen(&net.server().to_string()).start();
    assert!(reaches(&net, &server));
    let lose_all = |net: &Net| net.lose(1.0);
    for fault in [Net::cut, Net::cut_inbound, Net::cut_outbound, Net::unplug, lose_all] {
        fault(&net);
        assert!(!reaches(&net, &server));
        net.heal();
        // A link that was down takes a moment, and the packets that it drops meanwhile a second.
        look::wait_until("it is reached again", BOUND, || reaches(&net, &server));
    }

    // A cut tells an open connection nothing, not even when the program at the other end is killed.
    let hold = format!("exec 3<>/dev/tcp/{}/{}; exec cat <&3", net.server(), server.port());
    let mut held = net.command("bash").args(["-c", &hold]).stdout(Stdio::null()).spawn().unwrap();
    let connected = || {
        let port = format!(":{}", server.port());
        let address = net.server().to_string();
        let out = Command::new("ss").args(["-Htn", "src", &address, "sport", &port]).output();
        String::from_utf8(out.unwrap().stdout).unwrap().contains("ESTAB")
    };
    look::wait_until("it is connected", BOUND, connected);
    net.cut();
    held.kill().unwrap();
    held.wait().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(connected(), "the server's host has heard nothing");
}

#[test]
fn a_namespace_is_gone_with_its_owner() {
    let net = Net::new();
    let names = || {
        let out = Command::new("ip").args(["netns", "list"]).output().unwrap();
        String::from_utf8(out.stdout).unwrap()
    };
    let name = net.name().to_owned();
    assert!(names().contains(&name));
    drop(net);
    assert!(!names().contains(&name));
}

#[test]
fn a_pooler_answers_shares_one_session_and_comes_back_after_kill_9() {
    let server = Server::start();
    let pid = |client: &mut Client| -> i32 {
        client.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0)
    };
    let mut pooler = PgBouncer::start(&server, "session", &[]);
    let (mut a, mut b) = (pooler.client(), pooler.client());
    a.batch_execute("SELECT 1").unwrap();
    assert_ne!(pid(&mut a), pid(&mut b), "a session each");
    pooler.kill9();
    assert!(a.batch_execute("SELECT 1").is_err());
    assert!(pooler.config().connect(NoTls).is_err());
    pooler.start_again();
    pooler.client().batch_execute("SELECT 1").unwrap();

    let pooler = PgBouncer::start(&server, "transaction", &[("default_pool_size", "1")]);
    let (mut a, mut b) = (pooler.client(), pooler.client());
    let simple =
        |client: &mut Client| format!("{:?}", client.simple_query("SELECT pg_backend_pid()"));
    assert_eq!(simple(&mut a), simple(&mut b), "one session for both");
    pooler.freeze();
    let answer = ask(a);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!answer.is_finished());
    pooler.thaw();
    assert!(answer.join().unwrap().0);
    pooler.admin("RECONNECT");
}
