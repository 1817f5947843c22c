//! The examples do what they say.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use leasehold::postgres::Client;

use crate::support::leases::PATIENCE;
use crate::support::{Server, ends_idle_sessions, look};

/// An example's program, built if it is not up to date.
fn example(name: &str) -> Command {
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--example", name])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .unwrap();
    assert!(built.success());
    let tests = std::env::current_exe().unwrap();
    let profile: PathBuf = tests.ancestors().nth(2).unwrap().into();
    Command::new(profile.join("examples").join(name))
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn holds(client: &mut Client, name: &str) -> bool {
    look::holder_pid(client, leasehold::key(name)).is_some()
}

#[test]
fn demo_shows_each_hand_over_on_80_columns_without_colours_in_a_pipe() {
    let server = Server::start();
    let output = example("demo").arg(server.url()).output().unwrap();
    let text = text(&output);
    if !ends_idle_sessions() {
        // The stopped replica keeps the lease, and the demo ends there.
        assert!(!output.status.success() && text.contains("SIGSTOP"), "{text}");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("nobody leads within the bound"), "{error}");
        return;
    }
    assert!(output.status.success(), "{text}");
    assert_eq!(text.matches("LEADS, token 1-").count(), 4, "{text}");
    for step in ["kill -9", "SIGSTOP", "SIGCONT", "lease lost", "ask replica"] {
        assert!(text.contains(step), "no {step} in\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(!text.contains('\x1b'));
}

#[test]
fn singleton_leads_until_its_input_ends() {
    let server = Server::start();
    let mut replica = example("singleton")
        .arg(server.url())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut eye = server.client();
    let mut lines = BufReader::new(replica.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().starts_with("leading singleton with token 1-"));
    assert!(holds(&mut eye, "singleton"));
    drop(replica.stdin.take());
    assert_eq!(lines.last().as_deref(), Some("stopping: Some(Cancelled)"));
    assert!(replica.wait().unwrap().success());
    assert!(!holds(&mut eye, "singleton"));
}

#[test]
fn fenced_writes_bills_each_invoice_once_though_its_leader_is_superseded() {
    let server = Server::start();
    let output = example("fenced_writes").arg(server.url()).output().unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let refused =
        text.lines().filter(|line| line.starts_with("first: invoice") && line.contains("refused"));
    assert_eq!(refused.count(), 1, "{text}");
    for invoice in 1..=6 {
        let billed = format!("invoice {invoice} billed");
        assert_eq!(text.matches(&billed).count(), 1, "{billed}:\n{text}");
    }
    assert!(text.ends_with("not billed: 0\n"), "{text}");
    let mut eye = server.client();
    let rows = eye.query("SELECT fence FROM demo_invoices ORDER BY id", &[]).unwrap();
    let fences: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    assert!(fences.is_sorted() && fences[0] < fences[5], "{fences:?}");
}

#[test]
fn batch_once_runs_on_one_host_and_says_where_not() {
    let server = Server::start();
    let mut first = example("batch_once").arg(server.url()).stdout(Stdio::piped()).spawn().unwrap();
    let mut eye = server.client();
    look::wait_until("it runs", PATIENCE, || holds(&mut eye, "nightly-batch"));
    let second = example("batch_once").arg(server.url()).output().unwrap();
    assert!(second.status.success());
    assert_eq!(text(&second), "runs on another host\n");
    let status = first.wait().unwrap();
    assert!(status.success());
    let nowhere = example("batch_once").arg("postgres://127.0.0.1:1/nowhere").output().unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("refused"));
    look::wait_until("released", Duration::from_secs(1), || !holds(&mut eye, "nightly-batch"));
}
