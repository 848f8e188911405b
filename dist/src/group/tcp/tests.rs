//! Meetings and connections under attack: each ends in time, and names the rank and why.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread::{JoinHandle, spawn};

use super::proof::{Answer, Hello, Key, Letter, Talk};
use super::*;
use crate::group::Group as _;

const SECRET_A: &[u8] = b"one that nobody guesses, A";
const SECRET_B: &[u8] = b"one that nobody guesses, B";

/// Time that a meeting has which is to fail.
const SHORT: Duration = Duration::from_millis(700);

/// Time that a meeting has which is to succeed.
const LONG: Duration = Duration::from_secs(20);

/// A loopback address at which no program listens.
fn free() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

fn at(address: SocketAddr, rank: u32, size: u32) -> Rendezvous {
    Rendezvous::at(address.to_string(), rank, size)
}

/// A rank on a thread of its own.
fn join(meets: Rendezvous, timeout: Duration) -> JoinHandle<Result<Host>> {
    spawn(move || connect(&meets, timeout))
}

/// The error of a rank, by its parts.
fn error(rank: JoinHandle<Result<Host>>) -> (u32, String, String) {
    let error = rank.join().unwrap().err().unwrap();
    (error.rank, error.field, error.text)
}

fn says((rank, field, text): &(u32, String, String), wanted: (u32, &str, &str)) {
    assert_eq!((*rank, &**field), (wanted.0, wanted.1), "{text}");
    assert!(text.contains(wanted.2), "{text}");
}

/// A connection to a rank that begins to listen at some time.
fn dial(address: SocketAddr) -> TcpStream {
    loop {
        if let Ok(stream) = TcpStream::connect(address) {
            return stream;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Says hello to rank 0 as this rank would, by a key.
fn greet(address: SocketAddr, rank: u32, size: u32, key: &Key) -> Answer {
    let hello = Hello { rank, size, wants: 0, listens: free() };
    Talk::connect(dial(address), &hello, key, after(LONG)).unwrap()
}

fn welcome(answer: Answer) -> Talk {
    match answer {
        Answer::Welcome(talk) => talk,
        Answer::Refused(error) => panic!("refused: {error}"),
        Answer::OtherSecret => panic!("another secret"),
    }
}

fn key(secret: &[u8]) -> Key {
    Key::new(Some(&Secret(secret.to_owned())), &[])
}

/// Checks that both ranks of a group can send each other a byte.
fn serves(ranks: [JoinHandle<Result<Host>>; 2]) {
    let hosts = ranks.map(|rank| rank.join().unwrap().unwrap());
    let all = hosts.map(|host| spawn(move || host.share(&[host.rank() as u8]).unwrap()));
    assert!(all.into_iter().all(|told| told.join().unwrap() == [[0], [1]]));
}

#[test]
fn words_of_the_environment_are_refused_by_name_and_text() {
    let from = |changed: &str, text: Option<&str>| {
        let usual = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "29500")];
        Rendezvous::from_words(|name| {
            let usual = usual.into_iter().find(|(known, _)| *known == name).map(|(_, text)| text);
            let text = if name == changed { text } else { usual };
            text.map(str::to_owned).ok_or_else(|| "none".to_owned())
        })
    };
    assert_eq!(from("", None), Ok(Rendezvous::at("here:29501", 1, 2)));
    for (name, text, says) in [
        ("RANK", Some("NaN"), "RANK is `NaN`: invalid digit found in string"),
        ("WORLD_SIZE", Some("-2"), "WORLD_SIZE is `-2`: invalid digit found in string"),
        ("WORLD_SIZE", Some(""), "WORLD_SIZE is ``: cannot parse integer from empty string"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not to be had: none"),
        ("MASTER_PORT", Some("65535"), "MASTER_PORT is 65535, and the port above is none"),
        ("MASTER_PORT", Some("4294967295"), "MASTER_PORT is 4294967295, and the port above is none"),
    ] {
        let error = from(name, text).unwrap_err();
        assert_eq!((&*error.field, &*error.text), (name, says));
    }
}

#[test]
fn the_environment_fills_what_the_caller_left_out() {
    let words = |secret: Option<&str>, listen: Option<&str>, rank: Rendezvous| {
        rank.with_words(secret.map(|secret| secret.as_bytes().to_owned()), listen.map(str::to_owned))
    };
    let plain = || Rendezvous::at("127.0.0.1:1", 3, 4);
    let full = || plain().secret("a secret of the caller").listen(Ipv4Addr::LOCALHOST.into());
    assert_eq!(words(None, None, plain()), Ok(plain()));
    assert_eq!(words(Some("another secret"), Some("::1"), full()), Ok(full()));
    let filled = plain().secret("another secret").listen("::1".parse().unwrap());
    assert_eq!(words(Some("another secret"), Some("::1"), plain()), Ok(filled));
    let error = words(None, Some("eth0"), plain()).unwrap_err();
    assert_eq!((error.rank, &*error.field), (3, "FMHA_DIST_LISTEN"));
    assert!(error.text.contains("`eth0`"), "{error}");
}

#[test]
fn a_group_of_too_many_ranks_is_refused_at_once() {
    let error = connect(&Rendezvous::at("127.0.0.1:1", 0, u32::MAX), LONG).err().unwrap();
    assert_eq!((&*error.field, &*error.text), ("size", "4294967295 ranks are more than 16384"));
}

#[test]
fn who_connects_and_says_nothing_or_too_little_keeps_no_rank_waiting() {
    let address = free();
    let start = Instant::now();
    let first = join(at(address, 0, 2), LONG);
    let mut held = Vec::new();
    for count in [0, 1, 16, 60] {
        let mut silent = dial(address);
        silent.write_all(&[7; 64][..count]).unwrap();
        held.push(silent);
    }
    serves([first, join(at(address, 1, 2), LONG)]);
    assert!(start.elapsed() < LONG / 4, "{:?}", start.elapsed());
}

#[test]
fn a_hello_of_a_byte_now_and_then_holds_no_meeting_beyond_its_timeout() {
    let (address, start) = (free(), Instant::now());
    let root = join(at(address, 0, 2), SHORT);
    let mut slow = dial(address);
    let drips = spawn(move || {
        while start.elapsed() < 4 * SHORT && slow.write_all(&[0x58]).is_ok() {
            std::thread::sleep(SHORT / 5);
        }
    });
    says(&error(root), (1, "group", "rank 1 has not come in time"));
    assert!(start.elapsed() < 2 * SHORT, "{:?}", start.elapsed());
    drips.join().unwrap();
}

#[test]
fn a_root_that_sends_a_byte_now_and_then_holds_no_rank_beyond_its_timeout() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (address, start) = (listener.local_addr().unwrap(), Instant::now());
    let member = join(at(address, 1, 2), SHORT);
    let (mut stream, _) = listener.accept().unwrap();
    let drips = spawn(move || {
        while start.elapsed() < 4 * SHORT && stream.write_all(&[0x58]).is_ok() {
            std::thread::sleep(SHORT / 5);
        }
    });
    says(&error(member), (0, "group", "rank 0 is not there"));
    assert!(start.elapsed() < 2 * SHORT, "{:?}", start.elapsed());
    drips.join().unwrap();
}

/// A root that announces a list longer than the ranks need is not read to the end.
#[test]
fn a_list_is_as_long_as_the_ranks_need() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let member = join(at(address, 1, 2).secret(SECRET_A), LONG);
    let (stream, _) = listener.accept().unwrap();
    let key = key(SECRET_A);
    let (_, talk, knows) = Talk::accept(stream, (0, 2), &key, after(LONG)).unwrap();
    assert!(knows);
    talk.send(&key, &Letter::Welcome, after(LONG)).unwrap();
    // More than the system holds for a reader that has gone away.
    let poured = talk.send(&key, &Letter::List(vec![0; 64 << 20]), after(LONG));
    says(&error(member), (0, "group", "67108864 bytes are announced where at most 36 are to come"));
    assert!(poured.is_err());
}

#[test]
fn a_rank_that_says_hello_and_closes_is_the_one_that_is_named_on_every_rank() {
    let address = free();
    let root = join(at(address, 0, 3).secret(SECRET_A), LONG);
    drop(welcome(greet(address, 1, 3, &key(SECRET_A))));
    let other = join(at(address, 2, 3).secret(SECRET_A), LONG);
    for rank in [root, other] {
        says(&error(rank), (1, "group", "rank 1 has left the meeting"));
    }
}

#[test]
fn without_a_secret_ranks_meet_on_the_loopback_alone() {
    for (rank, address) in [(0, "0.0.0.0:0"), (1, "192.0.2.1:9"), (1, "[2001:db8::1]:9"), (0, "[::]:0")] {
        let error = connect(&Rendezvous::at(address, rank, 2), SHORT).err().unwrap();
        assert_eq!((error.rank, &*error.field), (rank, "secret"), "{error}");
        assert!(error.text.contains(address) && error.text.contains("FMHA_DIST_SECRET"), "{error}");
    }
    let listens = Rendezvous::at("127.0.0.1:0", 0, 2).listen(Ipv4Addr::UNSPECIFIED.into());
    assert_eq!(connect(&listens, SHORT).err().unwrap().field, "secret");
    let short = Rendezvous::at("127.0.0.1:0", 0, 1).secret("0123456789abcde");
    let error = connect(&short, SHORT).err().unwrap();
    assert_eq!(error.field, "secret");
    assert!(error.text.contains("15 bytes") && !error.text.contains("0123456789"), "{error}");
    assert!(!format!("{short:?}").contains("0123456789"), "{short:?}");
}

#[test]
fn a_member_listens_at_one_address_that_reaches_the_root_or_that_it_was_told() {
    for told in [None, Some(Ipv4Addr::new(127, 0, 0, 3).into())] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut member = at(listener.local_addr().unwrap(), 1, 2);
        member.listen = told;
        let member = join(member, LONG);
        let key = Key::new(None, &[]);
        let (stream, _) = listener.accept().unwrap();
        let (hello, talk, _) = Talk::accept(stream, (0, 2), &key, after(LONG)).unwrap();
        assert_eq!(hello.listens.ip(), told.unwrap_or(Ipv4Addr::LOCALHOST.into()));
        // Nowhere else: another address of the host is free at that port.
        assert!(TcpStream::connect((Ipv4Addr::new(127, 0, 0, 2), hello.listens.port())).is_err());
        drop(talk);
        drop(listener);
        drop(member);
    }
}

#[test]
fn ranks_of_one_secret_meet_and_ranks_of_unlike_ones_do_not() {
    let address = free();
    let with = |rank, secret: &[u8]| at(address, rank, 2).secret(secret);
    serves([join(with(0, SECRET_A), LONG), join(with(1, SECRET_A), LONG)]);
    for other in [with(1, SECRET_B), at(address, 1, 2)] {
        let root = join(with(0, SECRET_A), SHORT);
        says(&error(join(other, LONG)), (0, "secret", "does not know the secret of rank 1"));
        says(&error(root), (1, "group", "came as rank 1 and does not know the secret"));
    }
    // A stranger takes no seat: the rank itself comes after it.
    let root = join(with(0, SECRET_A), LONG);
    assert!(matches!(greet(address, 1, 2, &key(SECRET_B)), Answer::OtherSecret));
    serves([root, join(with(1, SECRET_A), LONG)]);
}

/// Forwards the bytes of one connection, and gives those that its client sent.
fn recorded(to: SocketAddr) -> (SocketAddr, JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let records = spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = dial(to);
        let (mut back, mut from) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let answers = spawn(move || std::io::copy(&mut from, &mut back).map(drop));
        let (mut said, mut bytes) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            said.extend_from_slice(&bytes[..count]);
            let _ = server.write_all(&bytes[..count]);
        }
        let _ = server.shutdown(std::net::Shutdown::Both);
        // The way in which the connection ends does not matter.
        let _ = answers.join();
        said
    });
    (address, records)
}

#[test]
fn what_a_rank_has_said_once_gets_nobody_a_seat() {
    let address = free();
    let root = join(at(address, 0, 2).secret(SECRET_A), LONG);
    let (proxy, records) = recorded(address);
    serves([root, join(at(proxy, 1, 2).secret(SECRET_A), LONG)]);
    let said = records.join().unwrap();
    let root = join(at(address, 0, 2).secret(SECRET_A), SHORT);
    let mut replays = dial(address);
    replays.write_all(&said).unwrap();
    let text = error(root);
    says(&text, (1, "group", "came as rank 1 and does not know the secret"));
}

#[test]
fn a_rank_that_comes_twice_or_is_of_another_size_or_rank_is_named_on_every_rank() {
    let address = free();
    let with = |rank, size| at(address, rank, size).secret(SECRET_A);
    let root = join(with(0, 3), LONG);
    let _first = welcome(greet(address, 1, 3, &key(SECRET_A)));
    let second = join(with(1, 3), LONG);
    for rank in [root, second] {
        says(&error(rank), (1, "rank", "rank 1 has come twice"));
    }
    for (rank, size, field, text) in [
        (1, 4, "size", "rank 1 is one of 4, not of 3"),
        (3, 4, "size", "one of 4"),
        (1, 2, "size", "one of 2"),
    ] {
        let ranks = [join(with(0, 3), LONG), join(with(rank, size), LONG)];
        for ended in ranks {
            says(&error(ended), (rank, field, text));
        }
    }
    // A member whose connection has broken comes again.
    let root = join(with(0, 2), LONG);
    let _other = dial(address);
    serves([root, join(with(1, 2), LONG)]);
}

/// Ranks above 0 prove the secret to each other too.
#[test]
fn a_stranger_at_the_port_of_a_member_takes_no_seat() {
    let address = free();
    let with = |rank| at(address, rank, 3).secret(SECRET_A);
    let key = key(SECRET_A);
    let root = join(with(0), LONG);
    let first = join(with(1), LONG);
    // The test acts as rank 2: it gets rank 1's address from the root, and first connects there with another
    // secret.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let hello = Hello { rank: 2, size: 3, wants: 0, listens: listener.local_addr().unwrap() };
    let talk = welcome(Talk::connect(dial(address), &hello, &key, after(LONG)).unwrap());
    let Ok(Some(Letter::List(list))) = talk.receive(&key, 54, after(LONG)) else { panic!("no list") };
    let there = super::proof::address_of_bytes(list[18..36].first_chunk().unwrap());
    let to_first = Hello { wants: 1, ..hello };
    for wrong in [self::key(SECRET_B), Key::new(None, &[])] {
        let answer = Talk::connect(dial(there), &to_first, &wrong, after(LONG)).unwrap();
        assert!(matches!(answer, Answer::OtherSecret));
    }
    // A proof for rank 0 is none for rank 1.
    let to_another = Hello { wants: 2, ..hello };
    let answer = Talk::connect(dial(there), &to_another, &key, after(LONG)).unwrap();
    assert!(matches!(answer, Answer::Refused(error) if (error.rank, &*error.field) == (2, "rank")));
    says(&error(first), (2, "rank", "rank 2 looks for rank 2, and has come to rank 1"));
    drop(root.join().unwrap().unwrap());
}

#[test]
fn two_groups_at_one_port_do_not_mix() {
    let address = free();
    let root = join(at(address, 0, 2).secret(SECRET_A), LONG);
    drop(dial(address));
    let other = join(at(address, 0, 2).secret(SECRET_B), LONG);
    says(&error(other), (0, "group", "cannot listen at"));
    let strays = join(at(address, 1, 2).secret(SECRET_B), LONG);
    says(&error(strays), (0, "secret", "does not know the secret"));
    serves([root, join(at(address, 1, 2).secret(SECRET_A), LONG)]);
}

#[test]
fn a_file_where_ranks_meet_has_a_secret_that_others_do_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("here");
    let root = join(Rendezvous::file(&path, 0, 2), LONG);
    let wait = |path: &Path| loop {
        if let Ok(text) = std::fs::read_to_string(path) {
            break text;
        }
    };
    let text = wait(&path);
    #[cfg(unix)]
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&path).unwrap()) & 0o777, 0o600);
    let address = text.lines().next().unwrap().parse().unwrap();
    assert!(matches!(greet(address, 1, 2, &Key::new(None, &[])), Answer::OtherSecret));
    serves([root, join(Rendezvous::file(&path, 1, 2), LONG)]);
}

/// Rank 0 of two, by a real group, and the bare connection of a rank 1 that says what it likes.
fn half_a_group(timeout: Duration) -> (Host, TcpStream) {
    let address = free();
    let root = join(at(address, 0, 2), timeout);
    let key = Key::new(None, &[]);
    let talk = welcome(greet(address, 1, 2, &key));
    assert!(matches!(talk.receive(&key, 36, after(LONG)), Ok(Some(Letter::List(_)))));
    (root.join().unwrap().unwrap(), talk.stream)
}

#[test]
fn leaving_a_rank_that_takes_nothing_ends_in_time() {
    let (host, _stopped) = half_a_group(SHORT);
    // More than the system holds for a rank that does not read.
    let late = host.share(&vec![0; 64 << 20]).unwrap_err();
    assert_eq!((late.rank, &*late.field), (1, "exchange"), "{late}");
    let start = Instant::now();
    drop(host);
    assert!(start.elapsed() < 2 * SHORT, "{:?}", start.elapsed());
}

#[test]
fn a_rank_that_takes_slowly_gets_all_before_the_other_one_has_left() {
    let (host, mut slow) = half_a_group(LONG);
    // The slow rank sends its own bytes first: the other rank waits for nothing before it leaves.
    slow.write_all(&[0, 1, 0, 0, 0, 0, 0, 0, 0, 5]).unwrap();
    let takes = spawn(move || {
        let (mut all, mut bytes) = (0, vec![0; 1 << 20]);
        loop {
            match slow.read(&mut bytes).unwrap() {
                0 => break all,
                count => all += count,
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    assert_eq!(host.share(&vec![0; 32 << 20]).unwrap()[1], [5]);
    drop(host);
    assert!(takes.join().unwrap() > 32 << 20);
}

#[test]
fn bytes_that_are_no_message_are_named_at_once() {
    for garbage in [&[77; 9][..], &[0, 255, 255, 255, 255, 255, 255, 255, 255], &[1, 5, 0, 0, 0, 0, 0, 0, 0]]
    {
        let (host, mut stream) = half_a_group(LONG);
        stream.write_all(garbage).unwrap();
        let error = host.share(&[1]).unwrap_err();
        assert_eq!((error.rank, &*error.field), (1, "group"));
        assert_eq!(error.text, "rank 1 sent what is no message of a group");
    }
    // Some of a message, and no more.
    for part in 0..9 {
        let (host, mut stream) = half_a_group(SHORT / 4);
        stream.write_all(&[0, 9, 0, 0, 0, 0, 0, 0, 0][..part]).unwrap();
        let error = host.share(&[1]).unwrap_err();
        assert_eq!((error.rank, &*error.field), (1, "exchange"), "{error}");
    }
}

/// A rank or the root sends some bytes of garbage at each message of a meeting, and then goes on or closes.
#[test]
fn garbage_of_any_length_at_each_message_ends_in_time_and_takes_no_seat() {
    let mut state = 9u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let address = free();
    let root = join(at(address, 0, 2).secret(SECRET_A), LONG);
    for round in 0..40 {
        let mut stream = dial(address);
        let mut bytes: Vec<u8> = (0..random() % 300).map(|_| random() as u8).collect();
        if round % 2 == 1 {
            // The hello is right, so that the proof is what is not.
            let hello = [0xF3A1_D158u32, 1, 2, 0].map(u32::to_le_bytes).concat();
            bytes.splice(0..0, [&hello[..], &[0; 50]].concat());
        }
        let _ = stream.write_all(&bytes);
    }
    serves([root, join(at(address, 1, 2).secret(SECRET_A), LONG)]);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let start = Instant::now();
    let member = join(at(listener.local_addr().unwrap(), 1, 2).secret(SECRET_A), SHORT);
    listener.set_nonblocking(true).unwrap();
    while start.elapsed() < SHORT {
        if let Ok((mut stream, _)) = listener.accept() {
            let mut bytes: Vec<u8> = (0..random() % 300).map(|_| random() as u8).collect();
            if random() % 2 == 0 {
                bytes.splice(0..0, [0xF3A1_D158u32, 0, 2].map(u32::to_le_bytes).concat());
            }
            let _ = stream.write_all(&bytes);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = error(member);
    assert!(error.0 == 0 && (error.1 == "group" || error.1 == "secret"), "{error:?}");
    assert!(start.elapsed() < 2 * SHORT, "{:?}", start.elapsed());
}
