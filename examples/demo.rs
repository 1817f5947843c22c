//! Three replicas of one job, as processes: the leader is killed with -9, the next one stopped with
//! SIGSTOP and let go again, the last one asked to end. Who leads, with which token, and how long
//! each hand-over took.
//!
//! `scripts/demo`, or `cargo run --example demo -- postgres://user@host/db`

#![allow(clippy::print_stdout, reason = "an example talks to the terminal")]

use std::error::Error;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::{CancellationToken, Lease, Locker, Options, postgres};
use rustix::process::{Pid, Signal, kill_process};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const SECOND: Duration = Duration::from_secs(1);

/// Shorter than the defaults, so that the demo is.
fn options() -> Options {
    Options::new()
        .retry_interval(SECOND)
        .heartbeat_interval(SECOND)
        .query_timeout(SECOND)
        .application_name("leasehold-demo")
}

/// A replica: reports on standard output, ends when its standard input does.
fn replica(url: &str) -> Outcome<()> {
    let locker = Locker::new(url.parse()?, options())?;
    let stop = CancellationToken::new();
    let on_eof = stop.drop_guard();
    thread::spawn(move || {
        let ended = std::io::read_to_string(std::io::stdin());
        drop(on_eof);
        ended.map(drop)
    });
    let job = |lease: &Lease| -> Outcome<()> {
        say(&format!("leads {}", lease.token()))?;
        while !lease.wait_timeout(Duration::from_millis(100)) {}
        let reason = lease.cancellation().reason().map(|reason| reason.to_string());
        say(&format!("stops {}", reason.unwrap_or_default()))
    };
    locker.run(&stop, "demo", job).map_err(|error| error.to_string())?;
    locker.close();
    Ok(())
}

fn say(line: &str) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

struct Replica {
    child: Child,
    stdin: Option<ChildStdin>,
}

/// What a replica reported: which one, when, what.
type Report = (usize, Instant, String);

fn spawn(n: usize, url: &str, reports: Sender<Report>) -> Outcome<Replica> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["replica", url])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let stdin = child.stdin.take();
    let lines = BufReader::new(child.stdout.take().ok_or("no standard output")?).lines();
    thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if reports.send((n, Instant::now(), line)).is_err() {
                break;
            }
        }
    });
    Ok(Replica { child, stdin })
}

struct Show {
    start: Instant,
    reports: Receiver<Report>,
    colours: bool,
}

impl Show {
    fn line(&self, who: &str, what: &str, colour: &str) {
        let (on, off) = if self.colours { (colour, "\x1b[0m") } else { ("", "") };
        println!("{on}{:7.3} s  {who:<10} {what}{off}", self.start.elapsed().as_secs_f64());
    }

    /// Shows what is reported for `time`.
    fn watch(&self, time: Duration) {
        let end = Instant::now() + time;
        while let Ok((n, _, line)) =
            self.reports.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            self.line(&format!("replica {n}"), &line, "");
        }
    }

    /// Shows what is reported until one leads, and says which; measures from `since`.
    fn next_leader(&self, since: Instant, bound: Duration) -> Outcome<usize> {
        loop {
            let left = bound.saturating_sub(since.elapsed());
            let (n, at, line) = match self.reports.recv_timeout(left) {
                Ok(report) => report,
                Err(RecvTimeoutError::Timeout) => {
                    return Err("nobody leads within the bound".into());
                }
                Err(RecvTimeoutError::Disconnected) => return Err("all replicas ended".into()),
            };
            let who = format!("replica {n}");
            if let Some(token) = line.strip_prefix("leads ") {
                let took = at.saturating_duration_since(since);
                self.line(&who, &format!("LEADS, token {token}, after {took:.1?}"), "\x1b[32m");
                return Ok(n);
            }
            self.line(&who, &line, "");
        }
    }
}

fn signal(replica: &Replica, signal: Signal) -> Outcome<()> {
    let pid = Pid::from_raw(i32::try_from(replica.child.id())?).ok_or("no such process")?;
    Ok(kill_process(pid, signal)?)
}

fn play(url: &str) -> Outcome<()> {
    url.parse::<postgres::Config>()?;
    println!("bounds of these options:\n{}", options().budget());
    let (sender, reports) = channel();
    let colours = std::io::stdout().is_terminal();
    let show = Show { start: Instant::now(), reports, colours };
    let mut replicas = Vec::new();
    for n in 1..=3 {
        replicas.push(spawn(n, url, sender.clone())?);
    }
    drop(sender);
    let bound = Duration::from_secs(20);
    let outcome = (|| {
        let first = show.next_leader(show.start, bound)?;
        show.watch(SECOND);

        show.line("demo", &format!("kill -9 replica {first}"), "\x1b[31m");
        let at = Instant::now();
        replicas[first - 1].child.kill()?;
        let second = show.next_leader(at, bound)?;
        show.watch(SECOND);

        show.line(
            "demo",
            &format!("SIGSTOP replica {second}: it keeps its connection"),
            "\x1b[31m",
        );
        let at = Instant::now();
        signal(&replicas[second - 1], Signal::STOP)?;
        let third = show.next_leader(at, bound)?;
        show.line(
            "demo",
            &format!("SIGCONT replica {second}: it finds its lease lost"),
            "\x1b[33m",
        );
        signal(&replicas[second - 1], Signal::CONT)?;
        show.watch(SECOND);

        show.line("demo", &format!("ask replica {third} to end"), "\x1b[33m");
        let at = Instant::now();
        drop(replicas[third - 1].stdin.take());
        show.next_leader(at, bound).map(drop)
    })();
    for replica in &mut replicas {
        drop(replica.stdin.take());
        // A replica that still runs ends by itself now; one that cannot is killed.
        if outcome.is_err() {
            replica.child.kill()?;
        }
        replica.child.wait()?;
    }
    outcome
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["replica", url] => replica(url),
        [url] => play(url),
        _ => Err("usage: demo postgres://user@host/db".into()),
    }
}
