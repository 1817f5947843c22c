//! A second host on this machine: a network namespace with a wire to ours.

use std::ffi::OsStr;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;

use super::keeper::Keeper;

/// The other host. Needs root, and fails with what to install where something is missing.
pub struct Net {
    name: String,
    wire: String,
    server: Ipv4Addr,
    #[expect(dead_code, reason = "works by being there")]
    keeper: Keeper,
}

/// A number whose addresses, 10.high.low.x, no link here has. Numbers are drawn at random, so that
/// two runs at once hardly draw the same.
fn free_id() -> u16 {
    loop {
        let id = fastrand::u16(1..u16::MAX);
        let [high, low] = id.to_be_bytes();
        let taken = Command::new("ip")
            .args(["-4", "-o", "addr", "show", "to", &format!("10.{high}.{low}.0/24")])
            .env("PATH", PATH)
            .output();
        // Without `ip`, the first step says what is missing.
        if taken.is_ok_and(|out| !out.stdout.is_empty()) {
            continue;
        }
        return id;
    }
}

/// Where the programs are, whatever the user's path is.
const PATH: &str = "/usr/sbin:/sbin:/usr/bin:/bin";

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", PATH)
        .output()
        .map_err(|error| {
            format!("cannot run {program}: {error}; install it (Debian: iproute2, iptables), and run as root")
        })?;
    let text = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(()).ok_or(format!("{program} {arguments:?}: {text}"))
}

impl Net {
    pub fn new() -> Net {
        let id = free_id();
        let [high, low] = id.to_be_bytes();
        let name = format!("leasehold-{id}");
        let script = "ip netns del $0; rm -rf /etc/netns/$0";
        let net = Net {
            keeper: Keeper::new(script, &[OsStr::new(&name)]),
            name,
            wire: format!("lease{id}"),
            server: Ipv4Addr::new(10, high, low, 1),
        };
        let inside = format!("in{id}");
        let (name, wire) = (net.name.as_str(), net.wire.as_str());
        let address = |last: u8| format!("10.{high}.{low}.{last}/24");
        let steps: [&[&str]; 7] = [
            &["netns", "add", name],
            &["link", "add", wire, "type", "veth", "peer", "name", &inside, "netns", name],
            &["addr", "add", &address(1), "dev", wire],
            &["link", "set", wire, "up"],
            &["-n", name, "addr", "add", &address(2), "dev", &inside],
            &["-n", name, "link", "set", &inside, "up"],
            &["-n", name, "link", "set", "lo", "up"],
        ];
        for step in steps {
            run("ip", step).unwrap();
        }
        net
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Our side's address: what a server has to listen on.
    pub fn server(&self) -> IpAddr {
        self.server.into()
    }

    /// A command that runs on the other host.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.env("PATH", PATH).args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// Gives the other host a name server that never answers, for as long as the value lives.
    pub fn resolver_that_is_silent(&self) -> Resolver {
        let folder = PathBuf::from("/etc/netns").join(&self.name);
        std::fs::create_dir_all(&folder).unwrap();
        let [a, b, c, _] = self.server.octets();
        std::fs::write(folder.join("resolv.conf"), format!("nameserver {a}.{b}.{c}.9\n")).unwrap();
        Resolver(folder)
    }

    fn iptables(&self, arguments: &[&str]) {
        let mut all = vec!["netns", "exec", &self.name, "iptables", "-w"];
        all.extend(arguments);
        run("ip", &all).unwrap();
    }

    /// Every packet of the other host is lost, both ways: no FIN, no RST, no error.
    pub fn cut(&self) {
        self.iptables(&["-A", "INPUT", "-j", "DROP"]);
        self.iptables(&["-A", "OUTPUT", "-j", "DROP"]);
    }

    /// Nothing reaches the other host any more; what it sends arrives.
    pub fn cut_inbound(&self) {
        self.iptables(&["-A", "INPUT", "-j", "DROP"]);
    }

    /// Nothing of what the other host sends arrives any more.
    pub fn cut_outbound(&self) {
        self.iptables(&["-A", "OUTPUT", "-j", "DROP"]);
    }

    /// The wire is unplugged on our side.
    pub fn unplug(&self) {
        run("ip", &["link", "set", &self.wire, "down"]).unwrap();
    }

    /// A part of the packets is lost, both ways.
    pub fn lose(&self, part: f64) {
        let part = part.to_string();
        for chain in ["INPUT", "OUTPUT"] {
            let random = ["-m", "statistic", "--mode", "random", "--probability", &part];
            let mut rule = vec!["-A", chain];
            rule.extend(random);
            rule.extend(["-j", "DROP"]);
            self.iptables(&rule);
        }
    }

    /// The wire is whole again.
    pub fn heal(&self) {
        self.iptables(&["-F"]);
        run("ip", &["link", "set", &self.wire, "up"]).unwrap();
    }
}

/// The other host's own configuration of name resolution.
pub struct Resolver(PathBuf);

impl Drop for Resolver {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            assert!(std::thread::panicking(), "{error}");
        }
    }
}

impl AsRef<str> for Net {
    fn as_ref(&self) -> &str {
        self.name()
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // The wire goes with the namespace.
        if let Err(error) = run("ip", &["netns", "del", &self.name]) {
            assert!(std::thread::panicking(), "{error}");
        }
    }
}
