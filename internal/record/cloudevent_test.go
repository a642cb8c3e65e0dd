package record

import (
	"bytes"
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestDataSurvives(t *testing.T) {
	for name, data := range map[string]string{
		"large integer":      `9007199254740993`,
		"trailing zero":      `0.10`,
		"negative zero":      `-0.0`,
		"half a surrogate":   `"\ud800"`,
		"duplicate names":    `{"a":1,"a":2}`,
		"deepest nesting":    strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000),
		"deepest objects":    strings.Repeat(`{"a":`, 10_000) + "0" + strings.Repeat("}", 10_000),
		"HTML":               `"<script>&amp;</script>"`,
		"line separators":    "\"\u2028\u2029\"",
		"escapes":            `"\u003c\/\u0041"`,
		"whitespace inside":  "{ \"a\" :\t[ 1 ,\r\n2 ] }",
		"envelope's names":   `{"id":"9","data":{"data":null},"sequence":1}`,
		"exponents":          `[1E400,1e-400,-1.0E+2]`,
		"null":               `null`,
		"empty name":         `{"":""}`,
		"DEL and C1 control": "\"\u007f\u0085\"",
	} {
		t.Run(name, func(t *testing.T) {
			if !json.Valid([]byte(data)) {
				t.Fatal("encoding/json would refuse it at the door")
			}
			for _, r := range []Record{sample(), command()} {
				r.Data = []byte(data)
				if err := r.Check(); err != nil {
					t.Fatal(err)
				}
				got, err := ParseCloudEvent(r.AppendCloudEvent(nil))
				if err != nil {
					t.Fatal(err)
				}
				if string(got.Data) != data {
					t.Errorf("became %.80q", got.Data)
				}
				if ContentHash(&got) != ContentHash(&r) {
					t.Error("hash differs")
				}
			}
		})
	}
}

func TestDataIsCutToItsFirstAndLastByte(t *testing.T) {
	a, b := sample(), sample()
	b.Data = []byte(" \t\r\n" + string(a.Data) + "\n ")
	if !bytes.Equal(a.AppendCloudEvent(nil), b.AppendCloudEvent(nil)) || ContentHash(&a) != ContentHash(&b) {
		t.Error("whitespace around data counts")
	}
	a.Data, b.Data = nil, []byte("null")
	if !bytes.Equal(a.AppendCloudEvent(nil), b.AppendCloudEvent(nil)) || ContentHash(&a) != ContentHash(&b) {
		t.Error("absent data is not null")
	}
	// Around it on the wire, too.
	wire := strings.Replace(string(b.AppendCloudEvent(nil)), `"data":null`, "\"data\" :\n {\"n\": 1 }\t", 1)
	if r, err := ParseCloudEvent([]byte(wire)); err != nil || string(r.Data) != `{"n": 1 }` {
		t.Errorf("%q, %v", r.Data, err)
	}
}

func TestParseCloudEventRefuses(t *testing.T) {
	event := string(func() []byte { r := full(); return r.AppendCloudEvent(nil) }())
	com := string(func() []byte { r := command(); return r.AppendCloudEvent(nil) }())
	const seq = `"sequence":"00000000000000000003"`
	for _, c := range []struct{ name, in, old, new, want string }{
		{"nothing", "", "", "", "not a JSON object"},
		{"an array", "[]", "", "", "not a JSON object"},
		{"an empty object", "{}", "", "", "specversion is missing"},
		{"no end", event[:len(event)-1], "", "", "ends in the middle"},
		{"more after it", event + "x", "", "", "goes on after its object"},
		{"a byte order mark", "\ufeff" + event, "", "", "not a JSON object"},
		{"not UTF-8 in data", event, `"s":"`, "\"s\":\"\xff", "not UTF-8"},
		{"not UTF-8 in an unknown attribute", event, `"step":"2"`, "\"step\":\"2\",\"x\":\"\xc3\"", "not UTF-8"},
		{"a comma at the end", event[:len(event)-1] + ",}", "", "", "attribute name: "},
		{"no comma", event, `"step":"2",`, `"step":"2" `, "unexpected '\"'"},
		{"no colon", event, `"step":`, `"step" `, `after attribute "step"`},
		{"twice", event, `"step":"2"`, `"step":"2","step":"2"`, `attribute "step" is there twice`},
		{"twice, once null", event, `"step":"2"`, `"step":null,"step":"2"`, `attribute "step" is there twice`},
		{"twice, once escaped", event, `"step":"2"`, `"step":"2","\u0073tep":"2"`, `attribute "step" is there twice`},
		{"data twice", event, `"data":`, `"data":1,"data":`, `attribute "data" is there twice`},
		{"unknown twice", event, `"step":`, `"x":1,"x":2,"step":`, `attribute "x" is there twice`},
		{"unknown is no JSON", event, `"step":`, `"x":01,"step":`, "x: unexpected"},
		{"a control character", event, `"step":"2"`, "\"step\":\"2\t\"", "step: unexpected"},
		{"data is no JSON", event, `"n": 9`, `"n": 09`, "data: unexpected"},
		{"data too deep", com, `{"eur":12.50}`, strings.Repeat("[", 10_001) + strings.Repeat("]", 10_001), "data: nests deeper than 10000"},
		{"specversion", event, `"specversion":"1.0"`, `"specversion":"0.3"`, `specversion "0.3" is not 1.0`},
		{"datacontenttype", event, `application/json`, `text/plain`, `datacontenttype "text/plain" is not application/json`},
		{"data_base64", event, `"data":`, `"data_base64":"YQ==","data":`, "data_base64 is not for JSON data"},
		{"no data", event, `"data":`, `"dat":`, "data is missing"},
		{"id missing", event, `"id":"3",`, ``, "id is missing"},
		{"id null", event, `"id":"3"`, `"id":null`, "id is missing"},
		{"id empty", event, `"id":"3"`, `"id":""`, "id is empty"},
		{"id a number", event, `"id":"3"`, `"id":3`, "id: not a string"},
		{"id zero", event, `"id":"3"`, `"id":"0"`, "sequence"},
		{"id and sequence zero", strings.Replace(event, `"id":"3"`, `"id":"0"`, 1), seq, `"sequence":"00000000000000000000"`, "id 0 is not a positive number"},
		{"id with a leading zero", event, `"id":"3"`, `"id":"03"`, `id "03" is not a decimal number`},
		{"id with a sign", event, `"id":"3"`, `"id":"+3"`, `id "+3" is not a decimal number`},
		{"id negative", event, `"id":"3"`, `"id":"-3"`, `id "-3" is not a decimal number`},
		{"id too large", event, `"id":"3"`, `"id":"9223372036854775808"`, `id "9223372036854775808" is not a decimal number`},
		{"id far too large", event, `"id":"3"`, `"id":"100000000000000000003"`, `is not a decimal number`},
		{"sequence missing", event, seq + ",", "", "sequence is missing"},
		{"sequence of another id", event, seq, `"sequence":"00000000000000000013"`, "sequence"},
		{"sequence short", event, seq, `"sequence":"0000000000000000003"`, "sequence"},
		{"sequence long", event, seq, `"sequence":"000000000000000000003"`, "sequence"},
		{"sequence padded with spaces", event, seq, `"sequence":"                   3"`, "sequence"},
		{"source missing", event, `"source":`, `"sourc":`, "source is missing"},
		{"source short", event, `"source":"/edge-1`, `"source":"`, `is not /<node>/<tenant>/<run>/<branch>`},
		{"source without slash", event, `"source":"/`, `"source":"`, `is not /<node>/<tenant>/<run>/<branch>`},
		{"source long", event, ulid1 + `"`, ulid1 + `/x"`, "source: branch"},
		{"node", event, `"/edge-1`, `"/edge 1`, "source: node"},
		{"tenant", event, `/default/`, `//`, "partitionkey"},
		{"run", strings.Replace(event, `/order-9/`, `/order~9/`, 1), `default/order-9"`, `default/order~9"`, "source: run"},
		{"branch in lower case", event, ulid1, strings.ToLower(ulid1), "source: branch"},
		{"partitionkey missing", event, `"partitionkey":`, `"p":`, "partitionkey is missing"},
		{"partitionkey of another run", event, `"partitionkey":"default/order-9"`, `"partitionkey":"default/order-8"`, "partitionkey"},
		{"type missing", event, `"type":`, `"typ":`, "type is missing"},
		{"type empty", event, `"type":"counted"`, `"type":""`, "type is empty"},
		{"type half a surrogate", event, `"type":"counted"`, `"type":"\udc00"`, "type: has half a surrogate pair"},
		{"type of two first halves", event, `"type":"counted"`, `"type":"\ud800\ud800"`, "type: has half a surrogate pair"},
		{"type with a bad escape", event, `"type":"counted"`, `"type":"\x"`, "type: unexpected"},
		{"type with a short escape", event, `"type":"counted"`, `"type":"\u12"`, "type: unexpected"},
		{"subject empty", event, `"subject":"line-1 <\"7\">"`, `"subject":""`, "subject is empty"},
		{"correlationid empty", event, `"correlationid":"order-9"`, `"correlationid":""`, "correlationid is empty"},
		{"time missing", event, `"time":`, `"tim":`, "time is missing"},
		{"time in milliseconds", event, `05.000006Z`, `05.000Z`, "time "},
		{"time in nanoseconds", event, `05.000006Z`, `05.000006000Z`, "time "},
		{"time with an offset", event, `05.000006Z`, `05.000006+00:00`, "time "},
		{"time in lower case", event, `05.000006Z`, `05.000006z`, "time "},
		{"30 February", event, `2026-01-02`, `2026-02-30`, "time "},
		{"month 13", event, `2026-01-02`, `2026-13-02`, "time "},
		{"hour 24", event, `T03:04:05.000006`, `T24:04:05.000006`, "time "},
		{"a leap second", event, `T03:04:05.000006`, `T03:04:60.000006`, "time "},
		{"recordedtime missing", event, `"recordedtime":`, `"r":`, "recordedtime is missing"},
		{"prevlsn missing", event, `"prevlsn":`, `"p":`, "prevlsn is missing"},
		{"prevlsn not before", event, `"prevlsn":"2"`, `"prevlsn":"3"`, "prevlsn 3 is not in 0 to 2"},
		{"branchgen zero", event, `"branchgen":"1"`, `"branchgen":"0"`, "branchgen 0 is not a positive number"},
		{"nodeepoch", event, `"nodeepoch":"1767225600"`, `"nodeepoch":"1e9"`, "nodeepoch"},
		{"step", event, `"step":"2"`, `"step":"two"`, "step"},
		{"torun of an event", event, `"step":`, `"torun":"a","step":`, "torun is there without toagent"},
		{"expirytime of an event", event, `"step":`, `"expirytime":"a","step":`, "expirytime is there without toagent"},
		{"toagent", com, `"toagent":"billing"`, `"toagent":"billing@hq"`, "toagent"},
		{"toagent empty", com, `"toagent":"billing"`, `"toagent":""`, "toagent is empty"},
		{"torun missing", com, `"torun":`, `"t":`, "torun is missing"},
		{"torun of the node", com, `"torun":"inv-7"`, `"torun":"~node"`, "torun"},
		{"inputid missing", com, `"inputid":`, `"i":`, "inputid is missing"},
		{"hops missing", com, `"hops":`, `"h":`, "hops is missing"},
		{"hops negative", com, `"hops":"1"`, `"hops":"-1"`, "hops"},
		{"expirytime", com, `04:04:05.000006Z`, `04:04:05Z`, "expirytime"},
		{"expirytime of never", com, `2026-01-02T04:04:05.000006Z`, `1970-01-01T00:00:00.000000Z`, "expirytime"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := c.in
			if c.old != "" {
				if !strings.Contains(in, c.old) {
					t.Fatalf("%s is not in %s", c.old, in)
				}
				in = strings.Replace(in, c.old, c.new, 1)
			}
			r, err := ParseCloudEvent([]byte(in))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %s", err, c.want)
			}
			if !reflect.DeepEqual(r, Record{}) {
				t.Errorf("a record beside the error: %+v", r)
			}
		})
	}
}

func TestParseCloudEventIgnoresWhatItDoesNotKnow(t *testing.T) {
	want := full()
	in := strings.Replace(string(want.AppendCloudEvent(nil)), `"step"`,
		`"dataschema":"urn:x","Data":"other","x":{"data":[1,{"id":"7"}]} , "toagent":null,"y":true,"step"`, 1)
	got, err := ParseCloudEvent([]byte(" " + in + "\n"))
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v\n got %+v\nwant %+v", err, got, want)
	}
}

func TestParseCloudEventTakesAnyOrderAndEscape(t *testing.T) {
	want := full()
	var attributes map[string]json.RawMessage
	if err := json.Unmarshal(want.AppendCloudEvent(nil), &attributes); err != nil {
		t.Fatal(err)
	}
	attributes["subject"] = []byte(`"\u006cine\u002d1 \u003c\"7\"\u003E \/\b\f\n\r\t\\\ud83d\uDE00"`)
	want.Subject += " /\b\f\n\r\t\\\U0001f600"
	for range 20 { // a map's order is another each time
		b := []byte("{")
		for k, v := range attributes {
			if len(b) > 1 {
				b = append(b, ',')
			}
			b = append(append(append(append(b, '"'), k...), `":`...), v...)
		}
		got, err := ParseCloudEvent(append(b, '}'))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("%v\n got %+v\nwant %+v", err, got, want)
		}
	}
}

// The data of a result can be appended to without writing into the rest of the packet.
func TestDataEndsWhereItsPacketGoesOn(t *testing.T) {
	r := sample()
	b := r.AppendCloudEvent(nil)
	got, err := ParseCloudEvent(b)
	if err != nil || cap(got.Data) != len(got.Data) {
		t.Errorf("cap %d, len %d, %v", cap(got.Data), len(got.Data), err)
	}
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawRecord(t)
		if err := want.Check(); err != nil {
			t.Fatal(err)
		}
		prefix := []byte("kept")
		b := want.AppendCloudEvent(prefix)[len(prefix):]
		if !json.Valid(b) {
			t.Fatalf("not JSON: %s", b)
		}
		got, err := ParseCloudEvent(b)
		if err != nil {
			t.Fatalf("%v: %s", err, b)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("\n got %+v\nwant %+v", got, want)
		}
		if ContentHash(&got) != ContentHash(&want) {
			t.Fatal("hash differs")
		}
	})
}

// Every record, however broken, becomes JSON: what is written is never worse than what can be reported.
func TestAppendCloudEventAlwaysWritesJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		raw := rapid.Custom(func(t *rapid.T) string { return string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")) })
		r := drawRecord(t)
		for _, s := range []*string{&r.Node, &r.Key.Tenant, &r.Key.Run, &r.Key.Branch, &r.Type, &r.Subject, &r.Correlation, &r.Causation, &r.Trace, &r.ToAgent, &r.ToRun, &r.InputID} {
			*s = raw.Draw(t, "text")
		}
		for _, n := range []*int64{&r.LSN, &r.PrevLSN, &r.Gen, &r.Epoch, &r.Step, &r.Hops, &r.Occurred, &r.Recorded, &r.Expires} {
			*n = rapid.Int64().Draw(t, "number")
		}
		b := r.AppendCloudEvent(nil)
		if !json.Valid(b) || !utf8.Valid(b) {
			t.Fatalf("%q", b)
		}
		if got, err := ParseCloudEvent(b); err == nil {
			if err := got.Check(); err != nil {
				t.Fatalf("parsed, yet not valid: %v", err)
			}
		}
	})
}

func TestCheckNamesWhatIsWrong(t *testing.T) {
	for want, change := range map[string]func(*Record){
		"kind 3":              func(r *Record) { r.Kind = Message },
		"kind 0":              func(r *Record) { r.Kind = 0 },
		"type is empty":       func(r *Record) { r.Type = "" },
		"type \"\\xff\"":      func(r *Record) { r.Type = "\xff" },
		"subject \"\\xff\"":   func(r *Record) { r.Subject = "\xff" },
		"inputid \"\\xff\"":   func(r *Record) { r.InputID = "\xff" },
		"inputid is empty":    func(r *Record) { r.InputID = "" },
		"time is not":         func(r *Record) { r.Occurred = math.MaxInt64 },
		"recordedtime is not": func(r *Record) { r.Recorded = minTime - 1 },
		"expirytime is not":   func(r *Record) { r.Expires = maxTime + 1 },
		"data is not UTF-8":   func(r *Record) { r.Data = []byte("\"\xff\"") },
		"data has no value":   func(r *Record) { r.Data = nil },
		"data: unexpected":    func(r *Record) { r.Data = []byte("{]") },
		"data goes on":        func(r *Record) { r.Data = []byte("1 ") },
		"source: node":        func(r *Record) { r.Node = "a/b" },
		"source: tenant":      func(r *Record) { r.Key.Tenant = NodeRun },
		"source: run":         func(r *Record) { r.Key.Run = "" },
		"source: branch":      func(r *Record) { r.Key.Branch = "8" + ulid1[1:] },
		"id 0":                func(r *Record) { r.LSN = 0 },
		"prevlsn 4":           func(r *Record) { r.PrevLSN = 4 },
		"prevlsn -1":          func(r *Record) { r.PrevLSN = -1 },
		"branchgen 0":         func(r *Record) { r.Gen = 0 },
		"nodeepoch -1":        func(r *Record) { r.Epoch = -1 },
		"step -1":             func(r *Record) { r.Step = -1 },
		"hops -1":             func(r *Record) { r.Hops = -1 },
		"toagent":             func(r *Record) { r.ToAgent = "a b" },
		"torun":               func(r *Record) { r.ToRun = NodeRun },
		"an event has":        func(r *Record) { r.Kind = Event },
	} {
		r := command()
		if err := r.Check(); err != nil {
			t.Fatal(err)
		}
		change(&r)
		if err := r.Check(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
}

func TestTimesRoundTrip(t *testing.T) {
	for us, want := range map[int64]string{
		when:             "2026-01-02T03:04:05.000006Z",
		0:                "1970-01-01T00:00:00.000000Z",
		-1:               "1969-12-31T23:59:59.999999Z",
		minTime:          "0000-01-01T00:00:00.000000Z",
		maxTime:          "9999-12-31T23:59:59.999999Z",
		1709210096123456: "2024-02-29T12:34:56.123456Z",
	} {
		if got := string(AppendTime(nil, us)); got != want {
			t.Errorf("%d is %s, want %s", us, got, want)
		}
		if got, ok := parseTime([]byte(want)); !ok || got != us {
			t.Errorf("%s is %d, want %d", want, got, us)
		}
	}
	for us, want := range map[int64]string{
		minTime - 1:    "0000-01-01T00:00:00.000000Z",
		math.MinInt64:  "0000-01-01T00:00:00.000000Z",
		maxTime + 1:    "9999-12-31T23:59:59.999999Z",
		math.MaxInt64:  "9999-12-31T23:59:59.999999Z",
		maxTime + 1e16: "9999-12-31T23:59:59.999999Z",
	} {
		if got := string(AppendTime(nil, us)); got != want {
			t.Errorf("%d, which has no form, is %s, want %s", us, got, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		us := rapid.Int64Range(minTime, maxTime).Draw(t, "us")
		if got, ok := parseTime(AppendTime(nil, us)); !ok || got != us {
			t.Fatalf("%s is %d, want %d", AppendTime(nil, us), got, us)
		}
	})
}

func drawRecord(t *rapid.T) Record {
	name := rapid.StringMatching(`[A-Za-z0-9_-]{1,64}`)
	run := rapid.OneOf(name, rapid.Just(NodeRun))
	text := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{"", "<&>", "\u2028\x00\x1f\x7f\"\\/", "\U0001f600", "\ufffd\ufffe\uffff"}))
	full := rapid.OneOf(text.Filter(func(s string) bool { return s != "" }), name)
	at := rapid.OneOf(rapid.Int64Range(minTime, maxTime), rapid.Int64Range(when, when+1000))
	count := rapid.OneOf(rapid.Int64Range(0, 20), rapid.Int64Range(0, math.MaxInt64))
	r := Record{
		Node: name.Draw(t, "node"),
		Key: BranchKey{
			Tenant: name.Draw(t, "tenant"), Run: run.Draw(t, "run"),
			Branch: rapid.StringMatching(`[0-7][0-9A-HJKMNP-TV-Z]{25}`).Draw(t, "branch"),
		},
		LSN: rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, math.MaxInt64)).Draw(t, "lsn"),
		Gen: 1 + rapid.Int64Range(0, math.MaxInt64-1).Draw(t, "gen"), Epoch: count.Draw(t, "epoch"), Step: count.Draw(t, "step"),
		Kind: Event, Type: full.Draw(t, "type"), Subject: text.Draw(t, "subject"), Data: []byte(drawJSON(t, 3)),
		Occurred: at.Draw(t, "occurred"), Recorded: at.Draw(t, "recorded"),
		Correlation: text.Draw(t, "correlation"), Causation: text.Draw(t, "causation"), Trace: text.Draw(t, "trace"),
	}
	r.PrevLSN = rapid.Int64Range(0, r.LSN-1).Draw(t, "prevlsn")
	if rapid.Bool().Draw(t, "command") {
		r.Kind = Command
		r.ToAgent, r.ToRun, r.InputID, r.Hops = name.Draw(t, "toagent"), name.Draw(t, "torun"), full.Draw(t, "inputid"), count.Draw(t, "hops")
		if rapid.Bool().Draw(t, "expires") {
			r.Expires = at.Filter(func(us int64) bool { return us != 0 }).Draw(t, "expirytime")
		}
	}
	return r
}

// drawJSON draws a value as an agent may write it, with its own spacing, escapes, number forms and repeated names.
func drawJSON(t *rapid.T, depth int) string {
	space := rapid.SampledFrom([]string{"", "", " ", "\n\t", "\r\n  "})
	str := rapid.Custom(func(t *rapid.T) string {
		if rapid.Bool().Draw(t, "escaped") {
			return rapid.SampledFrom([]string{`""`, `"\ud800"`, `"\u00e9\/\b"`, `"data"`, `"\\\""`}).Draw(t, "string")
		}
		return `"` + string(appendText(nil, rapid.String().Draw(t, "string"))) + `"`
	})
	kind := rapid.IntRange(0, 5).Draw(t, "kind")
	if depth == 0 && kind > 3 {
		kind = 0
	}
	switch kind {
	case 0:
		return rapid.SampledFrom([]string{"null", "true", "false"}).Draw(t, "word")
	case 1:
		return rapid.StringMatching(`-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,4})?`).Draw(t, "number")
	case 2, 3:
		return str.Draw(t, "string")
	}
	var b strings.Builder
	ends := "[]"
	if kind == 5 {
		ends = "{}"
	}
	b.WriteByte(ends[0])
	b.WriteString(space.Draw(t, "space"))
	for i := range rapid.IntRange(0, 3).Draw(t, "size") {
		if i > 0 {
			b.WriteString("," + space.Draw(t, "space"))
		}
		if kind == 5 {
			b.WriteString(str.Draw(t, "name") + space.Draw(t, "space") + ":" + space.Draw(t, "space"))
		}
		b.WriteString(drawJSON(t, depth-1) + space.Draw(t, "space"))
	}
	b.WriteByte(ends[1])
	return b.String()
}
