package record

import (
	"encoding/hex"
	"testing"
)

// The hashes were computed apart from this code, with Python's hashlib. Stored hashes are compared with them for as long
// as a store lives.
func TestContentHashIsFixed(t *testing.T) {
	event := sample()
	event.Subject = "line-1"
	plain, com := sample(), command()
	msg := Record{Kind: Message, Topic: "zigbee2mqtt/lamp/set", Data: []byte(" ON "), Occurred: when}
	for want, r := range map[string]Record{
		"5ed96abcc402dee649d1c948b2cc9e977033fd36c3c1c0768d243a4bad1e109c": event,
		"f5d31dbc31dee86d73f542a87dcd3542959b30a210050c4da5593765805820d0": plain,
		"70d897cd7706497802d826b884e3a7e1f92efdd9bc602bd3e990f8eaa30ebd71": com,
		"d9b46cff8d33193e7e381303662aae89f22fa291b9d818843195c81abefb39d2": msg,
	} {
		h := ContentHash(&r)
		if got := hex.EncodeToString(h[:]); got != want {
			t.Errorf("%s %s: %s, want %s", r.Type, r.Topic, got, want)
		}
	}
}

func TestContentHashSeesContentAndNothingElse(t *testing.T) {
	com := command()
	want := ContentHash(&com)
	for name, change := range map[string]func(*Record){
		"type": func(r *Record) { r.Type += "x" }, "subject": func(r *Record) { r.Subject = "x" },
		"occurred": func(r *Record) { r.Occurred++ }, "data": func(r *Record) { r.Data = []byte(`{"eur":12.5}`) },
		"toagent": func(r *Record) { r.ToAgent += "x" }, "torun": func(r *Record) { r.ToRun += "x" },
		"inputid": func(r *Record) { r.InputID += "x" }, "kind": func(r *Record) { r.Kind = Event },
		"between fields": func(r *Record) { r.Type, r.Subject = r.Type[:3], r.Type[3:] },
	} {
		r := command()
		change(&r)
		if ContentHash(&r) == want {
			t.Errorf("%s does not count", name)
		}
	}
	for name, change := range map[string]func(*Record){
		"place": func(r *Record) {
			r.Node, r.Key, r.LSN, r.PrevLSN, r.Gen, r.Epoch, r.Step = "n", BranchKey{}, 9, 8, 7, 6, 5
		},
		"recorded": func(r *Record) { r.Recorded++ }, "hops": func(r *Record) { r.Hops++ }, "expires": func(r *Record) { r.Expires++ },
		"trace": func(r *Record) { r.Trace, r.Correlation, r.Causation = "a", "b", "c" }, "to node": func(r *Record) { r.ToNode = "hq" },
		"whitespace around data": func(r *Record) { r.Data = []byte(" \n" + string(r.Data) + "\t") },
	} {
		r := command()
		change(&r)
		if ContentHash(&r) != want {
			t.Errorf("%s counts", name)
		}
	}
}
