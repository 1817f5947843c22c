//! What the library relies on in PostgreSQL and in the driver, pinned: a version that changes one of
//! these is noticed here, and not in production.

use std::time::{Duration, Instant};

use leasehold::postgres::Client;
use leasehold::postgres::error::SqlState;
use leasehold::postgres::fallible_iterator::FallibleIterator;

use crate::support::{Server, ends_idle_sessions, look};

fn one<T: for<'a> leasehold::postgres::types::FromSql<'a>>(client: &mut Client, sql: &str) -> T {
    client.query_one(sql, &[]).unwrap().get(0)
}

#[test]
fn a_session_lock_outlives_a_rollback_and_counts_how_often_it_was_taken() {
    let server = Server::start();
    let mut client = server.client();
    client.batch_execute("BEGIN; SELECT pg_advisory_lock(1); ROLLBACK").unwrap();
    assert!(!one::<bool>(&mut server.client(), "SELECT pg_try_advisory_lock(1)"));
    assert!(one::<bool>(&mut client, "SELECT pg_try_advisory_lock(1)"));
    assert!(one::<bool>(&mut client, "SELECT pg_advisory_unlock(1)"));
    assert!(!one::<bool>(&mut server.client(), "SELECT pg_try_advisory_lock(1)"));
    assert!(one::<bool>(&mut client, "SELECT pg_advisory_unlock(1)"));
    assert!(!one::<bool>(&mut client, "SELECT pg_advisory_unlock(1)"), "a false, not an error");
}

#[test]
fn a_bigint_key_is_two_unsigned_halves_with_objsubid_1_and_a_pair_has_2() {
    let server = Server::start();
    let mut client = server.client();
    client.batch_execute("SELECT pg_advisory_lock(-1), pg_advisory_lock(7, -1)").unwrap();
    let rows = client
        .query(
            "SELECT classid, objid, objsubid FROM pg_locks WHERE locktype = 'advisory' ORDER BY 3",
            &[],
        )
        .unwrap();
    let rows: Vec<(u32, u32, i16)> =
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(rows, [(u32::MAX, u32::MAX, 1), (7, u32::MAX, 2)]);
}

#[test]
fn an_unlock_and_its_notification_in_one_statement_let_the_woken_win() {
    let server = Server::start();
    let (mut holder, mut waiter) = (server.client(), server.client());
    waiter.batch_execute("LISTEN c").unwrap();
    for _ in 0..100 {
        holder.batch_execute("SELECT pg_advisory_lock(1)").unwrap();
        holder.batch_execute("SELECT pg_advisory_unlock(1), pg_notify('c', '')").unwrap();
        let heard = waiter.notifications().timeout_iter(Duration::from_secs(5)).next().unwrap();
        assert!(heard.is_some());
        assert!(one::<bool>(&mut waiter, "SELECT pg_try_advisory_lock(1)"));
        assert!(one::<bool>(&mut waiter, "SELECT pg_advisory_unlock(1)"));
    }
}

#[test]
fn a_transaction_id_is_reused_after_a_crash_unless_its_transaction_was_flushed() {
    let mut server = Server::start();
    let token = |server: &Server, flushed: bool| -> i64 {
        let emit = ", pg_logical_emit_message(true, 'x', '')";
        let sql = "SELECT pg_current_xact_id()::text::int8";
        one(&mut server.client(), &format!("{sql}{}", if flushed { emit } else { "" }))
    };
    let mut reused = 0;
    for _ in 0..3 {
        let before = token(&server, false);
        server.kill9();
        server.start_again();
        reused += i32::from(token(&server, false) <= before);
        let before = token(&server, true);
        server.kill9();
        server.start_again();
        assert!(token(&server, true) > before, "a flushed one is not reused");
    }
    assert!(reused > 0, "the flush is needed");
}

#[test]
fn an_idle_session_time_out_frees_the_locks_of_a_silent_client() {
    let server = Server::start();
    let mut client = server.client();
    if !ends_idle_sessions() {
        let error = client.batch_execute("SET idle_session_timeout = 300").unwrap_err();
        assert_eq!(error.code(), Some(&SqlState::UNDEFINED_OBJECT));
        return;
    }
    client.batch_execute("SET idle_session_timeout = 300; SELECT pg_advisory_lock(1)").unwrap();
    let took = look::wait_until("freed", Duration::from_secs(5), || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
    assert!(took >= Duration::from_millis(250) && took < Duration::from_secs(1), "{took:?}");
    let error = client.batch_execute("SELECT 1").unwrap_err();
    assert!(
        error.is_closed() || error.code() == Some(&SqlState::IDLE_SESSION_TIMEOUT),
        "{error:?}"
    );
}

#[test]
fn the_driver_sees_a_notification_and_the_end_of_a_session_while_parked() {
    let server = Server::start();
    let mut client = server.client();
    client.batch_execute("LISTEN c").unwrap();
    let pid: i32 = one(&mut client, "SELECT pg_backend_pid()");
    let mut other = server.client();
    let relay = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        other.batch_execute("NOTIFY c").unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let at = Instant::now();
        other.execute("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
        at
    });
    let mut notifications = client.notifications();
    assert!(notifications.timeout_iter(Duration::from_secs(10)).next().unwrap().is_some());
    let ended = notifications.timeout_iter(Duration::from_secs(10)).next();
    let seen = Instant::now();
    assert!(!matches!(ended, Ok(Some(_))), "{ended:?}");
    assert!(seen - relay.join().unwrap() < Duration::from_millis(50));
}

#[test]
fn one_role_may_change_every_setting_that_our_sessions_change() {
    let server = Server::start();
    server.execute("CREATE ROLE plain LOGIN");
    let mut client = server.config().user("plain").connect(leasehold::postgres::NoTls).unwrap();
    for setting in [
        "search_path",
        "statement_timeout",
        "lock_timeout",
        "idle_session_timeout",
        "idle_in_transaction_session_timeout",
        "default_transaction_isolation",
        "default_transaction_read_only",
        "default_transaction_deferrable",
        "synchronous_commit",
        "tcp_keepalives_idle",
        "tcp_keepalives_interval",
        "tcp_keepalives_count",
        "tcp_user_timeout",
        "client_connection_check_interval",
    ] {
        let context = client
            .query_opt("SELECT context FROM pg_settings WHERE name = $1", &[&setting])
            .unwrap()
            .map(|row| row.get::<_, String>(0));
        let newer = ["idle_session_timeout", "client_connection_check_interval"];
        if newer.contains(&setting) && !ends_idle_sessions() {
            assert_eq!(context, None, "{setting}");
        } else {
            assert_eq!(context.as_deref(), Some("user"), "{setting}");
        }
    }
}
