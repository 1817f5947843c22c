//! TLS inside the guarded stream: every `sslmode`, and the same bounds.

use std::fs;
use std::net::IpAddr;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use leasehold::postgres::Config;
use leasehold::postgres::config::SslMode;
use leasehold::{Error, Locker, LostReason};
use postgres_native_tls::MakeTlsConnector;
use tempfile::TempDir;

use crate::support::leases::{NAME, PATIENCE, fast};
use crate::support::{Server, look};

/// A certificate for `localhost` that is its own authority, and its key.
fn certificate() -> &'static TempDir {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        let output = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"])
            .args(["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"])
            .args(["-keyout", "key.pem", "-out", "cert.pem"])
            .current_dir(folder.path())
            .output()
            .expect("openssl is missing: install it (Debian: apt-get install openssl)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        folder
    })
}

fn server_with_tls() -> Server {
    let folder = certificate().path();
    let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
    Server::builder()
        .conf("ssl", "on")
        .file("server.crt", &text("cert.pem"))
        .file("server.key", &text("key.pem"))
        .start()
}

fn connector(trusted: bool) -> MakeTlsConnector {
    let mut builder = native_tls::TlsConnector::builder();
    if trusted {
        let pem = fs::read(certificate().path().join("cert.pem")).unwrap();
        builder.add_root_certificate(native_tls::Certificate::from_pem(&pem).unwrap());
    }
    MakeTlsConnector::new(builder.build().unwrap())
}

fn config(server: &Server, mode: SslMode) -> Config {
    // The name that the certificate is for, and the address where the server is.
    let mut config = Config::new();
    config.host("localhost").hostaddr(IpAddr::from([127, 0, 0, 1])).port(server.port());
    config.user("postgres").dbname("postgres").ssl_mode(mode);
    config
}

/// Whether the session that holds the lease is encrypted.
fn is_encrypted(server: &Server) -> bool {
    let pid = look::holder_pid(&mut server.client(), leasehold::key(NAME)).unwrap();
    let sql = "SELECT ssl FROM pg_stat_ssl WHERE pid = $1";
    server.client().query_one(sql, &[&pid]).unwrap().get(0)
}

#[test]
fn each_sslmode_does_what_it_does_in_libpq() {
    let (with, without) = (server_with_tls(), Server::start());
    for (server, mode, encrypted) in [
        (&with, SslMode::Require, true),
        (&with, SslMode::Prefer, true),
        (&with, SslMode::Disable, false),
        (&without, SslMode::Prefer, false),
        (&without, SslMode::Disable, false),
    ] {
        let locker = Locker::with_tls(config(server, mode), connector(true), fast()).unwrap();
        let guard = locker.try_acquire(NAME).unwrap().unwrap();
        assert_eq!(is_encrypted(server), encrypted, "{mode:?}");
        guard.release().unwrap();
    }
    let refused = |locker: Locker| locker.ping().unwrap_err().chain();
    let locker =
        Locker::with_tls(config(&without, SslMode::Require), connector(true), fast()).unwrap();
    assert!(refused(locker).contains("does not offer TLS"));
    let locker =
        Locker::with_tls(config(&with, SslMode::Require), connector(false), fast()).unwrap();
    let text = refused(locker);
    assert!(text.contains("certificate"), "{text}");
    let locker = Locker::new(config(&with, SslMode::Require), fast()).unwrap();
    let text = refused(locker);
    assert!(text.contains("TLS"), "{text}");
}

#[test]
fn under_tls_losses_are_seen_in_the_same_time() {
    let server = server_with_tls();
    let config = config(&server, SslMode::Require);
    let locker = Locker::with_tls(config, connector(true), fast()).unwrap();
    let pid = |guard: &leasehold::LeaseGuard| {
        look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap()
    };
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let victim = pid(&guard);
    let client = &mut server.client();
    let start = Instant::now();
    client.execute("SELECT pg_terminate_backend($1)", &[&victim]).unwrap();
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
    assert!(matches!(guard.check(), Err(Error::Lost(LostReason::SessionEnded))));
    drop(guard);

    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let victim = pid(&guard);
    server.freeze_backend(victim);
    let start = Instant::now();
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    assert!(start.elapsed() < Duration::from_millis(1450), "{:?}", start.elapsed());
    assert!(matches!(guard.check(), Err(Error::Lost(LostReason::NoAnswer))));
    server.thaw_backend(victim);
    drop(guard);

    // Parked on a TLS stream, the owner is woken by requests and by releases.
    let guard = locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
    let start = Instant::now();
    for _ in 0..50 {
        locker.ping().unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    guard.release().unwrap();
}

#[test]
fn the_handshake_is_bounded() {
    let server = server_with_tls();
    let config = config(&server, SslMode::Require);
    server.freeze();
    let locker = Locker::with_tls(config, connector(true), fast()).unwrap();
    let start = Instant::now();
    assert!(locker.ping().unwrap_err().is_timeout());
    assert!(start.elapsed() < Duration::from_millis(1250), "{:?}", start.elapsed());
    server.thaw();
    locker.ping().unwrap();
}
