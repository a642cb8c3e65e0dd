package agent

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestDecodeEffectsReadsEveryField(t *testing.T) {
	got, err := DecodeEffects([]byte(`
	{"state": {"n": 3},
	 "events":   [{"type": "counted", "data": {"n": 3}, "subject": "line-1"}, {"type": "bare"}],
	 "commands": [{"agent": "billing@hq", "run": "inv-7", "type": "charge", "id": "c-1", "data": {}, "in": "5m", "expires_in": "1h"},
	              {"at": "2026-02-03T04:05:06.5+01:00"}],
	 "messages": [{"topic": "zigbee2mqtt/lamp/set", "data": {"state": "ON"}, "retain": true, "expires_in": "30s"},
	              {"topic": "a", "text": "na\u00efve \ud83d\ude00"}, {"topic": "b", "base64": "AP8="}, {"topic": "c", "data": null}],
	 "cancel":   ["c-0", ""],
	 "next": "continue"}`))
	if err != nil {
		t.Fatal(err)
	}
	want := Effects{
		State:  json.RawMessage(`{"n": 3}`),
		Events: []Event{{Type: "counted", Data: json.RawMessage(`{"n": 3}`), Subject: "line-1"}, {Type: "bare"}},
		Commands: []Command{
			{Agent: "billing@hq", Run: "inv-7", Type: "charge", ID: "c-1", Data: json.RawMessage(`{}`), In: 5 * time.Minute, ExpiresIn: time.Hour},
			{At: time.Date(2026, 2, 3, 3, 5, 6, 500_000_000, time.UTC)},
		},
		Messages: []Message{
			{Topic: "zigbee2mqtt/lamp/set", Payload: []byte(`{"state": "ON"}`), Retain: true, ExpiresIn: 30 * time.Second},
			{Topic: "a", Payload: []byte("naïve 😀")},
			{Topic: "b", Payload: []byte{0, 255}},
			{Topic: "c", Payload: []byte("null")},
		},
		Cancel: []string{"c-0", ""},
		Next:   Continue,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestNoEffectsAreLegal(t *testing.T) {
	for _, in := range []string{`{}`, " \n{ }\r\n", `{"events":[],"commands":[ ],"messages":[],"cancel":[]}`} {
		if got, err := DecodeEffects([]byte(in)); err != nil || !reflect.DeepEqual(got, Effects{}) {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
}

func TestNullStateIsAValueAndAbsentStateIsNone(t *testing.T) {
	if got, _ := DecodeEffects([]byte(`{"state": null}`)); string(got.State) != "null" {
		t.Errorf("null: %q", got.State)
	}
	if got, _ := DecodeEffects([]byte(`{}`)); got.State != nil {
		t.Errorf("absent: %q", got.State)
	}
}

// sacred are values that do not survive a trip through any, float64 or a re-encoding.
var sacred = []string{
	`9007199254740993`, `0.10`, `-0.0`, `1E400`, `0e0`, `"\ud800"`, `"\u00e9"`, `"é"`, `"<&>\u2028"`, "\"\u2028\"", `"\/"`,
	`{"a":1,"a":2}`, `{"b":1, "a" : 2}`, "{\n\t\"a\": [ 1,\r\n2 ]\n}", `[[],{},"]}\"",{"x":[{"y":"\\"}]}]`, `""`, `null`, `true`, `[ ]`,
}

func TestStateAndDataKeepTheSendersBytes(t *testing.T) {
	for _, v := range sacred {
		got, err := DecodeEffects([]byte(`{"state": ` + v + "\t\n" + `, "events":[{"data" :` + v + ` , "type":"e"}],
			"commands":[{"data":` + v + `}],"messages":[{"topic":"t","data":` + v + `}]}`))
		if err != nil {
			t.Errorf("%s: %v", v, err)
			continue
		}
		for where, b := range map[string][]byte{
			"state": got.State, "event": got.Events[0].Data, "command": got.Commands[0].Data, "message": got.Messages[0].Payload,
		} {
			if string(b) != v {
				t.Errorf("%s: sent %q, got %q", where, v, b)
			}
		}
	}
}

func TestDecodeEffectsRefuses(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{``, "effects: not JSON: unexpected end of JSON input"},
		{`{}{}`, "not JSON: invalid character '{' after top-level value"},
		{`{"state":01}`, "not JSON"},
		{"{\"state\":\"\xff\"}", "effects: not UTF-8"},
		{"\ufeff{}", "not JSON"},
		{`[]`, "effects: want an object, not an array"},
		{`null`, "want an object, not null"},
		{`{"foo":1}`, "effects: foo: unknown field"},
		{`{"State":1}`, "State: unknown field"},
		{`{"":1}`, `"": unknown field`},
		{`{"a.b\n":1}`, `"a.b\n": unknown field`},
		{`{"id":"x"}`, "id: unknown field"},
		{`{"state":1,"state":1}`, "state: given twice"},
		{`{"state":1,"st\u0061te":1}`, "state: given twice"},
		{`{"events":[{},{},{"type":"x","foo":1}]}`, "effects: events[2].foo: unknown field"},
		{`{"events":[{"type":"x","type":"x"}]}`, "events[0].type: given twice"},
		{`{"events":{}}`, "events: want an array, not an object"},
		{`{"events":[1]}`, "events[0]: want an object, not a number"},
		{`{"events":[{"type":1}]}`, "events[0].type: want a string, not a number"},
		{`{"events":[{"type":"\ud800"}]}`, `events[0].type: lone surrogate \ud800`},
		{`{"events":[{"type":"\\\udc00\ud800"}]}`, `events[0].type: lone surrogate \udc00`},
		{`{"events":[{"subject":"\ud800\ud800"}]}`, `events[0].subject: lone surrogate \ud800`},
		{`{"commands":[{},{"in":"soon"}]}`, `commands[1].in: want a duration such as 90s or 5m, not "soon"`},
		{`{"commands":[{"in":5}]}`, "commands[0].in: want a string, not a number"},
		{`{"commands":[{"in":"-1s"}]}`, "commands[0].in: -1s is too short"},
		{`{"commands":[{"expires_in":"0s"}]}`, "commands[0].expires_in: 0s is too short"},
		{`{"commands":[{"expires_in":"99999999h"}]}`, "commands[0].expires_in: want a duration"},
		{`{"commands":[{"in":"0s","at":"2026-01-01T00:00:00Z"}]}`, "commands[0]: in and at exclude each other"},
		{`{"commands":[{"at":"2026-01-01"}]}`, "commands[0].at: want RFC 3339"},
		{`{"commands":[{"at":"2026-01-01T0:00:00Z"}]}`, "commands[0].at: want RFC 3339"},
		{`{"commands":[{"at":"2026-01-01T00:00:00,5Z"}]}`, "commands[0].at: want RFC 3339"},
		{`{"commands":[{"at":"2026-01-01T00:00:00+24:00"}]}`, "commands[0].at: want RFC 3339"},
		{`{"commands":[{"at":"2026-02-30T00:00:00Z"}]}`, "commands[0].at: want RFC 3339"},
		{`{"commands":[{"at":"0000-01-01T00:00:00Z"}]}`, "commands[0].at: year 0 is outside 1970 to 9999"},
		{`{"commands":[{"at":"0001-01-01T00:00:00Z"}]}`, "commands[0].at: year 1 is outside"},
		{`{"commands":[{"at":"1969-12-31T23:59:59Z"}]}`, "commands[0].at: year 1969 is outside"},
		{`{"commands":[{"at":1764520000}]}`, `commands[0].at: want a string such as "2026-01-31T12:00:00Z", not the number 1764520000, which looks like the seconds from 1970 to 2025-11-30T16:26:40Z`},
		{`{"commands":[{"at":1764520000000}]}`, "commands[0].at: want a string such as \"2026-01-31T12:00:00Z\", not the number 1764520000000, which looks like the milliseconds from 1970 to 2025"},
		{`{"commands":[{"at":-1.5e300}]}`, `commands[0].at: want a string such as "2026-01-31T12:00:00Z", not the number -1.5e300`},
		{`{"commands":[{"at":"1764520000000"}]}`, `commands[0].at: want RFC 3339 such as 2026-01-31T12:00:00Z, not "1764520000000", which looks like the milliseconds from 1970 to 2025-11-30T16:26:40Z`},
		{`{"commands":[{"at":"1764520000000000000"}]}`, `which looks like the nanoseconds from 1970 to 2025`},
		{`{"commands":[{"at":"12"}]}`, `commands[0].at: want RFC 3339 such as 2026-01-31T12:00:00Z, not "12"`},
		{`{"commands":[{"at":null}]}`, `commands[0].at: want a string, not null`},
		{`{"commands":[{"in":"1764520000000"}]}`, `commands[0].in: want a duration such as 90s or 5m, not "1764520000000", a number without a unit`},
		{`{"commands":[{"in":"9999999h"}]}`, `commands[0].in: want a duration such as 90s or 5m, not "9999999h"`},
		{`{"commands":[{"expires_in":"-1s"}]}`, `commands[0].expires_in: -1s is too short`},
		{`{"messages":[{"topic":"t","text":"","expires_in":60}]}`, `messages[0].expires_in: want a string, not a number`},
		{`{"commands":[{"at":"9999-12-31T23:59:59-01:00"}]}`, "commands[0].at: year 10000 is outside"},
		{`{"messages":[{"topic":"t"}]}`, "messages[0]: needs exactly one of data, text, base64"},
		{`{"messages":[{"topic":"t","data":null,"text":""}]}`, "messages[0]: needs exactly one"},
		{`{"messages":[{"base64":"AP8"}]}`, "messages[0].base64: illegal base64"},
		{`{"messages":[{"base64":"AP9="}]}`, "messages[0].base64: illegal base64"},
		{`{"messages":[{"retain":0,"text":""}]}`, "messages[0].retain: want true or false, not a number"},
		{`{"messages":[{"text":true}]}`, "messages[0].text: want a string, not true"},
		{`{"cancel":["a",["b"]]}`, "cancel[1]: want a string, not an array"},
		{`{"next":"Wait"}`, `next: want wait, continue, done or fail, not "Wait"`},
		{`{"next":""}`, `next: want wait`},
		{`{"next":null}`, `next: want a string, not null`},
		{`{"cancel":[` + strings.Repeat(`"",`, maxItems) + `""]}`, "cancel: more than 10000 items"},
		{`{"` + strings.Repeat("k", 5000) + `":1}`, strings.Repeat("k", maxQuote) + `"…: unknown field`},
	} {
		got, err := DecodeEffects([]byte(c.in))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.80q: got error %v, want %s", c.in, err, c.want)
		}
		if !reflect.DeepEqual(got, Effects{}) {
			t.Errorf("%.80q: effects beside an error: %+v", c.in, got)
		}
	}
}

func TestDecodeReplyTellsItsForms(t *testing.T) {
	said := "héllo"
	for _, c := range []struct {
		in   string
		want Reply
	}{
		{`{"log":"h\u00e9llo"}`, Reply{Log: &said}},
		{`{"id":"a","heartbeat":true}`, Reply{ID: "a", Heartbeat: true}},
		{`{"id":"a"}`, Reply{ID: "a"}},
		{`{"next":"done","id":"a\u002fb"}` + "\r", Reply{ID: "a/b", Effects: Effects{Next: Done}}},
		{`{"id":"a","error":{"code":"busy","message":"m","retry_after":"3s"}}`,
			Reply{ID: "a", Error: &Error{Code: Busy, Message: "m", RetryAfter: 3 * time.Second}}},
		{`{"id":"a","error":{"code":"terminal"}}`, Reply{ID: "a", Error: &Error{Code: Terminal}}},
	} {
		if got, err := DecodeReply([]byte(c.in)); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %+v, %v", c.in, got, err)
		}
	}
}

func TestAFaultyReplyKeepsItsID(t *testing.T) {
	for _, c := range []struct{ in, id, want string }{
		{`{"foo":1,"id":"a"}`, "a", "foo: unknown field"},
		{`{"events":[{"bar":1}],"next":7,"id":"a"}`, "a", "events[0].bar: unknown field"},
		{`{"id":"a","id":"b"}`, "a", "id: given twice"},
		{`{"id":"a","log":"x"}`, "a", "log: stands alone"},
		{`{"log":"x","events":[]}`, "", "log: stands alone"},
		{`{"id":"a","heartbeat":false}`, "a", "heartbeat: is true"},
		{`{"id":"a","heartbeat":true,"state":1}`, "a", "heartbeat: is true and stands alone"},
		{`{"id":"a","error":{"code":"busy"},"state":1}`, "a", "error: stands alone"},
		{`{"id":"a","error":{"code":"fatal"}}`, "a", `error.code: want retryable, terminal or busy, not "fatal"`},
		{`{"id":"a","error":{}}`, "a", `error.code: want`},
		{`{"id":"a","error":"no"}`, "a", `error: want an object, not a string`},
		{`{"id":"a","error":{"code":"retryable","retry_after":"3s"}}`, "a", "error.retry_after: only with busy"},
		{`{"id":"a","error":{"code":"busy","retry_after":"-3s"}}`, "a", "error.retry_after: -3s is too short"},
		{`{"state":1}`, "", "id: missing"},
		{`{"id":""}`, "", "id: missing"},
		{`{"id":5}`, "", "id: want a string, not a number"},
		{`{"id":"\udfff"}`, "", "id: lone surrogate"},
		{`hello`, "", "not JSON"},
		{`"hello"`, "", "want an object, not a string"},
	} {
		got, err := DecodeReply([]byte(c.in))
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: got error %v, want %s", c.in, err, c.want)
		}
		if !reflect.DeepEqual(got, Reply{ID: c.id}) {
			t.Errorf("%s: got %+v, want the id %q alone", c.in, got, c.id)
		}
	}
}

func TestStepIDIsTheSameOnEveryAttempt(t *testing.T) {
	s := Step{Tenant: "t", Run: "r", Branch: "b", Number: 7, Attempt: 1}
	if got := s.ID(); got != "t/r/b/7/-" {
		t.Error(got)
	}
	s.Input = &Input{ID: "in/1"}
	if got := s.ID(); got != "t/r/b/7/in/1" {
		t.Error(got)
	}
	s.Attempt = 2
	if got := s.ID(); got != "t/r/b/7/in/1" {
		t.Error(got)
	}
}

// FuzzDecode compares with encoding/json, the lenient reader: what is accepted must be an object to it too, with the same
// bytes for state and data and no field but the known ones.
func FuzzDecode(f *testing.F) {
	for _, v := range sacred {
		f.Add([]byte(`{"state":` + v + `,"events":[{"type":"e","data":` + v + `}]}`))
	}
	f.Add([]byte(`{"id":"a","commands":[{"at":"2026-01-01T00:00:00Z","data":[1]},{"in":"5m"}],"cancel":["x"],"next":"done"}`))
	f.Add([]byte(`{"id":"a","messages":[{"topic":"t","text":"\ud83d\ude00"},{"base64":"AA=="},{"data":{}}]}`))
	f.Add([]byte(`{"id":"a","error":{"code":"busy","retry_after":"1s"}}`))
	f.Add([]byte(`{"log":"x"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		before := bytes.Clone(b)
		r, _ := DecodeReply(b)
		e, err := DecodeEffects(b)
		if !bytes.Equal(b, before) {
			t.Fatal("the input was changed")
		}
		if !utf8.ValidString(r.ID) {
			t.Fatalf("id %q", r.ID)
		}
		if err != nil {
			return
		}
		var want struct {
			State    json.RawMessage
			Events   []struct{ Data json.RawMessage }
			Commands []struct{ Data json.RawMessage }
			Messages []struct{ Data json.RawMessage }
			Cancel   []string
			Next     Next
		}
		d := json.NewDecoder(bytes.NewReader(b))
		if err := d.Decode(&want); err != nil || !utf8.Valid(b) {
			t.Fatalf("accepted what encoding/json refuses: %v", err)
		}
		if !bytes.Equal(e.State, want.State) || e.Next != want.Next {
			t.Fatalf("state %q next %q, want %q %q", e.State, e.Next, want.State, want.Next)
		}
		if len(e.Events) != len(want.Events) || len(e.Commands) != len(want.Commands) ||
			len(e.Messages) != len(want.Messages) || !(len(e.Cancel) == 0 && len(want.Cancel) == 0 || reflect.DeepEqual(e.Cancel, want.Cancel)) {
			t.Fatalf("got %+v, want %+v", e, want)
		}
		for i := range e.Events {
			if !bytes.Equal(e.Events[i].Data, want.Events[i].Data) {
				t.Fatalf("event %d: %q, want %q", i, e.Events[i].Data, want.Events[i].Data)
			}
		}
		for i := range e.Commands {
			if !bytes.Equal(e.Commands[i].Data, want.Commands[i].Data) {
				t.Fatalf("command %d: %q, want %q", i, e.Commands[i].Data, want.Commands[i].Data)
			}
		}
		for i := range e.Messages {
			if d := want.Messages[i].Data; d != nil && !bytes.Equal(e.Messages[i].Payload, d) {
				t.Fatalf("message %d: %q, want %q", i, e.Messages[i].Payload, d)
			}
		}
	})
}

func TestNullListIsEmpty(t *testing.T) {
	e, err := DecodeEffects([]byte(`{"events": null, "commands": null, "messages": null, "cancel": null}`))
	if err != nil || len(e.Events)+len(e.Commands)+len(e.Messages)+len(e.Cancel) != 0 {
		t.Errorf("%+v, %v", e, err)
	}
}
