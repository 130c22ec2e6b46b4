//! Who may meet: tokens, addresses and certificates.

use std::path::PathBuf;

use super::*;
use crate::peer::TlsFiles;

#[test]
fn another_token_is_refused() {
    let a = node("a");
    let other = PeerSettings { token: Some(b"other".to_vec()), ..settings("b") };
    let b = node_over(other, None).expect("starts");
    let chain = keys(5, 2);
    a.put(&chain);
    b.meet(&[&a]);
    until("b was refused", || b.value("peer_failures") > 1);
    assert_eq!((b.matches(&chain), b.value("peers_connected")), (0, 0));
}

#[test]
fn open_addresses_need_a_token() {
    let open = PeerSettings { listen: Some("0.0.0.0:0".into()), token: None, ..settings("a") };
    let error = node_over(open, None).err().expect("refused");
    assert!(error.to_string().starts_with("store.peer.listen: 0.0.0.0:0 is open"), "{error}");
}

#[test]
fn peers_meet_under_mutual_tls_and_strangers_do_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let files = |name: &str, ca: &str| certify(dir.path(), name, ca);
    let with = |name: &str, ca: &str| PeerSettings {
        tls: Some(files(name, ca)),
        token: None,
        ..settings(name)
    };
    let a = node_over(with("a", "ours"), None).expect("starts");
    let b = node_over(with("b", "ours"), None).expect("starts");
    let stranger = node_over(with("c", "theirs"), None).expect("starts");
    let plain = node("d");
    let old = Some(certify_until(dir.path(), "e", "ours", 2000));
    let expired = PeerSettings { tls: old, token: None, ..settings("e") };
    let expired = node_over(expired, None).expect("starts");
    let chain = keys(6, 20);
    a.put(&chain);
    for other in [&b, &stranger, &plain, &expired] {
        other.meet(&[&a]);
    }
    until("b knows a's blocks", || b.matches(&chain) == 20);
    assert_eq!(b.read(&chain, SOON), 20);
    for refused in [&stranger, &plain, &expired] {
        until("it was refused", || refused.value("peer_failures") > 0);
        assert_eq!((refused.value("peers_connected"), refused.matches(&chain)), (0, 0));
    }
}

/// A certificate for `name` by the authority `ca`, which is made if it is new.
fn certify(dir: &std::path::Path, name: &str, ca: &str) -> TlsFiles {
    certify_until(dir, name, ca, 4000)
}

/// The same, good until that year begins.
fn certify_until(dir: &std::path::Path, name: &str, ca: &str, year: i32) -> TlsFiles {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
    let file = |name: String, text: &str| -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, text).expect("writes");
        path
    };
    let (ca_file, ca_key) = (dir.join(format!("{ca}.pem")), dir.join(format!("{ca}.key")));
    let mut params = CertificateParams::new(Vec::new()).expect("params");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    if !ca_file.exists() {
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("signs");
        std::fs::write(&ca_file, certificate.pem()).expect("writes");
        std::fs::write(&ca_key, key.serialize_pem()).expect("writes");
    }
    let key = KeyPair::from_pem(&std::fs::read_to_string(&ca_key).expect("reads")).expect("a key");
    let issuer = Issuer::new(params, key);
    let own = KeyPair::generate().expect("a key");
    let mut leaf = CertificateParams::new(vec!["mooncake-peer".to_owned()]).expect("params");
    leaf.not_after = date_time_ymd(year, 1, 1);
    let leaf = leaf.signed_by(&own, &issuer).expect("signs");
    TlsFiles {
        ca: ca_file,
        certificate: file(format!("{name}.pem"), &leaf.pem()),
        key: file(format!("{name}.key"), &own.serialize_pem()),
        name: "mooncake-peer".into(),
    }
}
