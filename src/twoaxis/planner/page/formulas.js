// Written by docs/page_formulas.py from the Python of the planner: `make docs` writes it anew.
"use strict";
const formulas = (() => {
var _pyfunc_abs = Math.abs;
var _pyfunc_int = function (x, base) { // nargs: 1 2
    if(base !== undefined) return parseInt(x, base);
    return x<0 ? Math.ceil(x): Math.floor(x);
};
var _pyfunc_op_equals = function op_equals (a, b) { // nargs: 2
    var a_type = typeof a;
    // If a (or b actually) is of type string, number or boolean, we don't need
    // to do all the other type checking below.
    if (a_type === "string" || a_type === "boolean" || a_type === "number") {
        return a == b;
    }

    if (a == null || b == null) {
    } else if (Array.isArray(a) && Array.isArray(b)) {
        var i = 0, iseq = a.length == b.length;
        while (iseq && i < a.length) {iseq = op_equals(a[i], b[i]); i+=1;}
        return iseq;
    } else if (a.constructor === Object && b.constructor === Object) {
        var akeys = Object.keys(a), bkeys = Object.keys(b);
        akeys.sort(); bkeys.sort();
        var i=0, k, iseq = op_equals(akeys, bkeys);
        while (iseq && i < akeys.length)
            {k=akeys[i]; iseq = op_equals(a[k], b[k]); i+=1;}
        return iseq;
    } return a == b;
};
var _pyfunc_op_mult = function (a, b) { // nargs: 2
    if ((typeof a === 'number') + (typeof b === 'number') === 1) {
        if (a.constructor === String) return _pymeth_repeat.call(a, b);
        if (b.constructor === String) return _pymeth_repeat.call(b, a);
        if (Array.isArray(b)) {var t=a; a=b; b=t;}
        if (Array.isArray(a)) {
            var res = []; for (var i=0; i<b; i++) res = res.concat(a);
            return res;
        }
    } return a * b;
};
var _pyfunc_range = function (start, end, step) {
    var i, res = [];
    var val = start;
    var n = (end - start) / step;
    for (i=0; i<n; i++) {
        res.push(val);
        val += step;
    }
    return res;
};
var _pyfunc_str = String;
var _pymeth_append = function (x) { // nargs: 1
    if (!Array.isArray(this)) return this.append.apply(this, arguments);
    this.push(x);
};
var _pymeth_repeat = function(count) { // nargs: 0
    if (this.repeat) return this.repeat(count);
    if (count < 1) return '';
    var result = '', pattern = this.valueOf();
    while (count > 1) {
        if (count & 1) result += pattern;
        count >>= 1, pattern += pattern;
    }
    return result + pattern;
};
var BYTES, COUNTS, DEPTH_KERNELS, MINUS, MIXER_KERNELS, PRODUCT_COLUMNS, RANK, ROW, SECONDS, _arrival, _begun, _never, _run, _summary, advice, alive, all_gather_bytes, all_points, all_reduce_bytes, amount, bars, bars_of, best_rows, bound, bound_by, boundary_of_block, box_at, by_rank, cache_bytes_of, cache_read, collective_seconds, compute_seconds, copied, cost_in_words, data_parallel_bytes, depth_operator, edges_of, ends_saved_bytes, estimated_step, even_cuts, exposed_data_seconds, exposed_seconds, extended, facts, figure, fixed, forward_counts, forward_pass, fused, gpipe_order, gpus_of, gradients_waiting, harmonic_size, head_seconds, height_of, held, hop_bytes, ideal_bubble, interleaved_order, joined, kept_leaf_bytes, largest_block_bytes, launch_seconds, limit_of, limit_text, line_at, lines, link_of, link_seconds, links_of, log2_of, matmul_efficiency, memory_seconds, method_row, methods_of, min_of, mixer_operators, mixing_gradient_bytes, model_of, name_at, new_state_bytes, nice_step, numbers, one_f_one_b_order, one_line, one_point, opening, operator, operator_seconds, outline, overhead, pair_flops, pair_flops_of_one, pairs_of_work, parameter_counts, peak_memory, percent, pipeline_flow, place, place_of, points, points_of, prefill_state_bytes, ranked, reach_of, recomputed_bytes_of, reduce_scatter_bytes, refusal, run_of, saved_bytes_of, schedule_order, sent_bytes, sequence_of, simulate, simulated_microbatches, sorted_by, stage_memory, stage_seconds, state_bytes, states_of, step_of, steps, stored_bytes, stored_tokens, sublayer_seconds, table_row, table_rows, tensor_parallel_bytes, tensor_parallel_forward_bytes, text_at, three_digits, tokens_on_rank, tone_of, top_of, total_seconds, training_step, transfer_seconds, unpacked, update_seconds, visible_pairs_of, waiting_bytes, weights_read, with_control, work_of, work_of_prompts;
all_gather_bytes = function flx_all_gather_bytes (ranks, whole_bytes) {
    return (whole_bytes * (ranks - 1)) / ranks;
};

reduce_scatter_bytes = function flx_reduce_scatter_bytes (ranks, whole_bytes) {
    return (whole_bytes * (ranks - 1)) / ranks;
};

all_reduce_bytes = function flx_all_reduce_bytes (ranks, whole_bytes) {
    return ((2 * whole_bytes) * (ranks - 1)) / ranks;
};

tensor_parallel_bytes = function flx_tensor_parallel_bytes (ranks, sublayers, tokens, d_model, element_bytes, sequence) {
    var again, whole;
    whole = (tokens * d_model) * element_bytes;
    again = ((sequence=="tensor"))? (all_gather_bytes(ranks, whole)) : (0);
    return sublayers * ((2 * all_reduce_bytes(ranks, whole)) + again);
};

tensor_parallel_forward_bytes = function flx_tensor_parallel_forward_bytes (ranks, sublayers, tokens, d_model, element_bytes) {
    return sublayers * (all_reduce_bytes(ranks, (tokens * d_model) * element_bytes));
};

data_parallel_bytes = function flx_data_parallel_bytes (ranks, parameters, gradient_bytes, weight_bytes, microbatches, sharding) {
    var gradients, weights;
    gradients = parameters * gradient_bytes;
    weights = parameters * weight_bytes;
    if ((sharding=="none")) {
        return all_reduce_bytes(ranks, gradients);
    }
    if ((sharding=="optimizer")) {
        return reduce_scatter_bytes(ranks, gradients) + all_gather_bytes(ranks, weights);
    }
    return microbatches * ((2 * all_gather_bytes(ranks, weights)) + reduce_scatter_bytes(ranks, gradients));
};

mixing_gradient_bytes = function flx_mixing_gradient_bytes (ranks, parameters, gradient_bytes, sequence) {
    return ((sequence=="tensor"))? (all_reduce_bytes(ranks, parameters * gradient_bytes)) : (0.0);
};

stored_tokens = function flx_stored_tokens (tokens, chunk_tokens, ranks, sequence) {
    var held;
    held = ((chunk_tokens > 0))? (Math.min(tokens, chunk_tokens)) : (tokens);
    return ((sequence=="tensor"))? (Math.floor(((held + ranks) - 1)/ranks)) : (held);
};

stored_bytes = function flx_stored_bytes (state_bytes, tokens, chunk_tokens, ranks, sequence) {
    return state_bytes * stored_tokens(tokens, chunk_tokens, ranks, sequence);
};

even_cuts = function flx_even_cuts (blocks, chunks) {
    var chunk, cuts;
    cuts = [0];
    for (chunk = 0; chunk < chunks; chunk += 1) {
        _pymeth_append.call(cuts, ((cuts[chunk] + Math.floor(blocks/chunks)) + (((chunk < (blocks % chunks)))? (1) : (0))));
    }
    return cuts;
};

hop_bytes = function flx_hop_bytes (leaves, edges, ranks, forwarding) {
    var chunk, hops, leaf, stub1_seq, stub2_itr, total;
    hops = [];
    for (chunk = 1; chunk < edges.length - 1; chunk += 1) {
        total = 0;
        stub1_seq = leaves;
        if ((typeof stub1_seq === "object") && (!Array.isArray(stub1_seq))) { stub1_seq = Object.keys(stub1_seq);}
        for (stub2_itr = 0; stub2_itr < stub1_seq.length; stub2_itr += 1) {
            leaf = stub1_seq[stub2_itr];
            if (((ranks > 1) && alive(leaf, edges[chunk]) && ((!held(leaf, edges, chunk, ranks, forwarding))))) {
                total += leaf[2];
            }
        }
        _pymeth_append.call(hops, total);
    }
    return hops;
};

waiting_bytes = function flx_waiting_bytes (leaves, edges, ranks, forwarding) {
    var begun, chunk, ended, entering, first, last, leaf, own, rank, stub3_, stub3__, stub3_i0, stub3_iter0, stub4_, stub4__, stub4_i0, stub4_iter0, stub5_seq, stub6_itr;
    stub3_ = [];stub3_iter0 = _pyfunc_range(0, (edges.length - 1), 1);if ((typeof stub3_iter0 === "object") && (!Array.isArray(stub3_iter0))) {stub3_iter0 = Object.keys(stub3_iter0);}for (stub3_i0=0; stub3_i0<stub3_iter0.length; stub3_i0++) {stub3__ = stub3_iter0[stub3_i0];{stub3_.push(0);}}
    begun = stub3_;
    stub4_ = [];stub4_iter0 = _pyfunc_range(0, (edges.length - 1), 1);if ((typeof stub4_iter0 === "object") && (!Array.isArray(stub4_iter0))) {stub4_iter0 = Object.keys(stub4_iter0);}for (stub4_i0=0; stub4_i0<stub4_iter0.length; stub4_i0++) {stub4__ = stub4_iter0[stub4_i0];{stub4_.push(0);}}
    ended = stub4_;
    if (((ranks==1) || (forwarding=="naive"))) {
        return [begun, ended];
    }
    stub5_seq = leaves;
    if ((typeof stub5_seq === "object") && (!Array.isArray(stub5_seq))) { stub5_seq = Object.keys(stub5_seq);}
    for (stub6_itr = 0; stub6_itr < stub5_seq.length; stub6_itr += 1) {
        leaf = stub5_seq[stub6_itr];
        for (rank = 0; rank < ranks; rank += 1) {
            first = -1;
            last = -1;
            chunk = rank;
            while (chunk < (edges.length - 1)) {
                entering = (chunk > 0) && alive(leaf, edges[chunk]);
                own = (forwarding=="cached_own") && alive(leaf, edges[chunk + 1]);
                if (((first < 0) && (entering || own))) {
                    first = chunk;
                } else if (entering) {
                    last = chunk;
                }
                chunk += ranks;
            }
            if ((last > 0)) {
                begun[last] += leaf[2];
                ended[first] += leaf[2];
            }
        }
    }
    return [begun, ended];
};

alive = function flx_alive (leaf, boundary) {
    return (leaf[0] <= boundary) && (boundary <= leaf[1]);
};

held = function flx_held (leaf, edges, chunk, ranks, forwarding) {
    var earlier;
    earlier = chunk - ranks;
    if (((forwarding=="naive") || (earlier < 0))) {
        return false;
    }
    if ((forwarding=="cached_own")) {
        return alive(leaf, edges[earlier + 1]);
    }
    return (earlier > 0) && alive(leaf, edges[earlier]);
};

visible_pairs_of = function flx_visible_pairs_of (tokens, window) {
    var width;
    width = ((window==0))? (tokens) : (Math.min(window, tokens));
    return ((width * (width + 1)) / 2) + ((tokens - width) * width);
};

pair_flops = function flx_pair_flops (sublayer, tokens) {
    var pair, stub7_seq, stub8_itr, total;
    total = 0;
    stub7_seq = sublayer["pairs"];
    if ((typeof stub7_seq === "object") && (!Array.isArray(stub7_seq))) { stub7_seq = Object.keys(stub7_seq);}
    for (stub8_itr = 0; stub8_itr < stub7_seq.length; stub8_itr += 1) {
        pair = stub7_seq[stub8_itr];
        total = total + (pair[0] * visible_pairs_of(tokens, pair[1]));
    }
    return total;
};

pair_flops_of_one = function flx_pair_flops_of_one (sublayer, context) {
    return pair_flops(sublayer, context + 1) - pair_flops(sublayer, context);
};

forward_counts = function flx_forward_counts (model, batch, tokens) {
    var N, depth, elementwise, matmul, pairs, stub10_itr, stub9_seq, sub;
    N = batch * tokens;
    matmul = ((N * 2) * model["d_model"]) * model["vocab_size"];
    elementwise = N * model["norm_elementwise"];
    pairs = 0;
    depth = (N * ((model["ends"]["matmul"]) + (model["ends"]["elementwise"]))) + (model["ends"]["matmul_fixed"]);
    stub9_seq = model["sublayers"];
    if ((typeof stub9_seq === "object") && (!Array.isArray(stub9_seq))) { stub9_seq = Object.keys(stub9_seq);}
    for (stub10_itr = 0; stub10_itr < stub9_seq.length; stub10_itr += 1) {
        sub = stub9_seq[stub10_itr];
        matmul = matmul + (N * sub["matmul"]);
        pairs = pairs + (batch * pair_flops(sub, tokens));
        elementwise = elementwise + (N * (sub["elementwise"] + (sub["norms"] * model["norm_elementwise"])));
        depth = (depth + (N * ((sub["depth"]["matmul"]) + (sub["depth"]["elementwise"])))) + (sub["depth"]["matmul_fixed"]);
    }
    return ({matmul: matmul, pairs: pairs, elementwise: elementwise, depth: depth, all: ((matmul + pairs) + elementwise) + depth});
};

parameter_counts = function flx_parameter_counts (model) {
    var depth, ends, idle, matrix, stub11_seq, stub12_itr, sub, tables, total;
    matrix = model["vocab_size"] * model["d_model"];
    ends = ((model["tied"] > 0))? (matrix) : (2 * matrix);
    depth = model["ends"]["params"];
    total = ends + model["norm_params"];
    idle = 0;
    tables = 0;
    stub11_seq = model["sublayers"];
    if ((typeof stub11_seq === "object") && (!Array.isArray(stub11_seq))) { stub11_seq = Object.keys(stub11_seq);}
    for (stub12_itr = 0; stub12_itr < stub11_seq.length; stub12_itr += 1) {
        sub = stub11_seq[stub12_itr];
        depth = depth + (sub["depth"]["params"]);
        tables = (tables + sub["tables"]) + (sub["depth"]["tables"]);
        total = (total + sub["params"]) + (sub["norms"] * model["norm_params"]);
        if (((sub["routed"].length) > 0)) {
            idle = idle + (((sub["routed"][0]) - (sub["routed"][1])) * (sub["routed"][2]));
        }
    }
    return ({all: total + depth, used: (total + depth) - idle, depth: depth, embedding_and_head: ends, tables: tables, non_embedding: ((total + depth) - ends) - tables});
};

state_bytes = function flx_state_bytes (model, boundary) {
    var leaf, stub13_seq, stub14_itr, total;
    total = 0;
    stub13_seq = model["leaves"];
    if ((typeof stub13_seq === "object") && (!Array.isArray(stub13_seq))) { stub13_seq = Object.keys(stub13_seq);}
    for (stub14_itr = 0; stub14_itr < stub13_seq.length; stub14_itr += 1) {
        leaf = stub13_seq[stub14_itr];
        if (((leaf[0] <= boundary) && (boundary <= leaf[1]))) {
            total = total + leaf[2];
        }
    }
    return total;
};

new_state_bytes = function flx_new_state_bytes (model, earlier, later) {
    var leaf, stub15_seq, stub16_itr, total;
    total = 0;
    stub15_seq = model["leaves"];
    if ((typeof stub15_seq === "object") && (!Array.isArray(stub15_seq))) { stub15_seq = Object.keys(stub15_seq);}
    for (stub16_itr = 0; stub16_itr < stub15_seq.length; stub16_itr += 1) {
        leaf = stub15_seq[stub16_itr];
        if (((leaf[0] > earlier) && (leaf[0] <= later) && (later <= leaf[1]))) {
            total = total + leaf[2];
        }
    }
    return total;
};

boundary_of_block = function flx_boundary_of_block (model, block) {
    var index;
    for (index = 0; index < model["sublayers"].length; index += 1) {
        if (((model["sublayers"][index]["block"]) >= block)) {
            return index;
        }
    }
    return model["sublayers"].length;
};

kept_leaf_bytes = function flx_kept_leaf_bytes (model, first, last) {
    var leaf, made, stub17_seq, stub18_itr, total;
    total = 0;
    stub17_seq = model["leaves"];
    if ((typeof stub17_seq === "object") && (!Array.isArray(stub17_seq))) { stub17_seq = Object.keys(stub17_seq);}
    for (stub18_itr = 0; stub18_itr < stub17_seq.length; stub18_itr += 1) {
        leaf = stub17_seq[stub18_itr];
        made = (leaf[0] > first) || ((first==0) && (leaf[0]==0));
        if ((made && (leaf[0] <= last) && (leaf[3] > 0))) {
            total = total + leaf[2];
        }
    }
    return total;
};

saved_bytes_of = function flx_saved_bytes_of (model, first, last, tokens) {
    var index, sub, total;
    total = tokens * kept_leaf_bytes(model, first, last);
    for (index = first; index < last; index += 1) {
        sub = model["sublayers"][index];
        total = ((total + (tokens * (sub["saved"] + (sub["depth"]["saved"])))) + sub["saved_fixed"]) + (sub["depth"]["saved_fixed"]);
    }
    return total;
};

recomputed_bytes_of = function flx_recomputed_bytes_of (model, first, last, tokens) {
    var before, index, total;
    total = 0;
    before = first;
    for (index = first + 1; index < last + 1; index += 1) {
        if (((index==last) || ((model["sublayers"][index]["block"])!=(model["sublayers"][before]["block"])))) {
            total = total + new_state_bytes(model, before, index);
            before = index;
        }
    }
    if ((first==0)) {
        total = total + state_bytes(model, 0);
    }
    return total * tokens;
};

largest_block_bytes = function flx_largest_block_bytes (model, first, last, tokens) {
    var before, index, largest;
    largest = 0;
    before = first;
    for (index = first + 1; index < last + 1; index += 1) {
        if (((index==last) || ((model["sublayers"][index]["block"])!=(model["sublayers"][before]["block"])))) {
            largest = Math.max(largest, saved_bytes_of(model, before, index, tokens));
            before = index;
        }
    }
    return largest;
};

ends_saved_bytes = function flx_ends_saved_bytes (model, tokens, tensor_ranks) {
    var each, statistic, width;
    width = model["d_model"];
    statistic = Math.max(4, model["activations_bytes"]);
    each = ((model["ends"]["saved"]) + (width * model["activations_bytes"])) + statistic;
    return ((tokens * each) + (model["ends"]["saved_fixed"])) + (((width * model["vocab_size"]) * statistic) / tensor_ranks);
};

cache_bytes_of = function flx_cache_bytes_of (model, tokens, ranks) {
    var part, stub19_seq, stub20_itr, stub21_seq, stub22_itr, sub, total;
    total = model["ends"]["cache_fixed"];
    stub21_seq = model["sublayers"];
    if ((typeof stub21_seq === "object") && (!Array.isArray(stub21_seq))) { stub21_seq = Object.keys(stub21_seq);}
    for (stub22_itr = 0; stub22_itr < stub21_seq.length; stub22_itr += 1) {
        sub = stub21_seq[stub22_itr];
        total = (total + (sub["cache_fixed"] / ranks)) + (sub["depth"]["cache_fixed"]);
        stub19_seq = sub["cache"];
        if ((typeof stub19_seq === "object") && (!Array.isArray(stub19_seq))) { stub19_seq = Object.keys(stub19_seq);}
        for (stub20_itr = 0; stub20_itr < stub19_seq.length; stub20_itr += 1) {
            part = stub19_seq[stub20_itr];
            total = total + ((part[0] * (((part[1]==0))? (tokens) : (Math.min(part[1], tokens)))) / ranks);
        }
    }
    return total;
};

tone_of = function flx_tone_of (tables, row, goal, limit) {
    var other, own;
    own = tables["methods"][row["method"]]["goal"];
    other = (((goal!="all") && (own!=goal) && (own!="control")))? (" other") : ("");
    return (own + other) + (((row["memory_bytes"] > limit))? (" over") : (""));
};

limit_of = function flx_limit_of (tables, choice) {
    return tables["devices"][choice["device"]]["limit_bytes"];
};

limit_text = function flx_limit_text (tables, choice) {
    return ((amount(limit_of(tables, choice), BYTES)) + ", 90 % of one ") + (tables["devices"][choice["device"]]["name"]);
};

ranked = function flx_ranked (tables, rows, goal) {
    var methods, own, stub23_, stub23_i0, stub23_iter0, stub23_row;
    methods = tables["methods"];
    stub23_ = [];stub23_iter0 = rows;if ((typeof stub23_iter0 === "object") && (!Array.isArray(stub23_iter0))) {stub23_iter0 = Object.keys(stub23_iter0);}for (stub23_i0=0; stub23_i0<stub23_iter0.length; stub23_i0++) {stub23_row = stub23_iter0[stub23_i0];if (!((stub23_row["method"]!=(rows[0]["method"])))) {continue;}{stub23_.push(stub23_row);}}
    own = stub23_;
    return sorted_by((function list_comprehension (iter0) {var res = [];var row, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {row = iter0[i0];if (!((_pyfunc_op_equals(goal, "all") || (_pyfunc_op_equals((methods[row["method"]]["goal"]), goal))))) {continue;}{res.push(row);}}return res;}).call(this, own), "step_seconds");
};

with_control = function flx_with_control (control, rows) {
    var found, row, stub24_seq, stub25_itr;
    found = [control];
    stub24_seq = rows;
    if ((typeof stub24_seq === "object") && (!Array.isArray(stub24_seq))) { stub24_seq = Object.keys(stub24_seq);}
    for (stub25_itr = 0; stub25_itr < stub24_seq.length; stub25_itr += 1) {
        row = stub24_seq[stub25_itr];
        _pymeth_append.call(found, row);
    }
    return found;
};

advice = function flx_advice (tables, choice, rows, goal) {
    var entry, said, stub26_seq, stub27_itr;
    said = "";
    stub26_seq = tables["recommended"];
    if ((typeof stub26_seq === "object") && (!Array.isArray(stub26_seq))) { stub26_seq = Object.keys(stub26_seq);}
    for (stub27_itr = 0; stub27_itr < stub26_seq.length; stub27_itr += 1) {
        entry = stub26_seq[stub27_itr];
        if (((goal=="all") || (goal==entry["goal"]))) {
            said = ((said + (((said.length > 0))? ("; for ") : ("For "))) + entry["words"]) + " the paper recommends ";
            said = (said + (tables["methods"][entry["method"]]["name"])) + ", which ";
            said = said + (cost_in_words(ranked(tables, rows, entry["goal"]), rows[0], entry["method"], tables, choice));
        }
    }
    return said + ".";
};

cost_in_words = function flx_cost_in_words (own, control, method, tables, choice) {
    var at, instead, limit, over, row, said;
    limit = limit_of(tables, choice);
    said = "does not fit this model here";
    instead = "no method of this goal is within it";
    for (at = 0; at < own.length; at += 1) {
        row = own[(own.length - 1) - at];
        if ((row["memory_bytes"] <= limit)) {
            instead = (tables["methods"][row["method"]]["name"]) + " is the fastest within it";
        }
    }
    for (at = 0; at < own.length; at += 1) {
        row = own[at];
        if ((row["method"]==method)) {
            said = (("adds " + (percent(overhead(row, control, "step_seconds")))) + " to a training step (number ") + (_pyfunc_str((at + 1)));
            said = (((said + " of ") + _pyfunc_str(own.length)) + ") and needs ") + amount(row["memory_bytes"], BYTES);
            over = row["memory_bytes"] > limit;
            said = ((said + ((over)? (", over the limit of ") : (" of "))) + limit_text(tables, choice)) + ((over)? ("; " + instead) : (""));
        }
    }
    return said;
};

bars_of = function flx_bars_of (tables, rows, key, goal, limit) {
    var given, row, shares, stub28_seq, stub29_itr, text, value;
    shares = (key=="step_seconds") || (key=="token_seconds");
    given = [];
    stub28_seq = sorted_by(rows, "step_seconds");
    if ((typeof stub28_seq === "object") && (!Array.isArray(stub28_seq))) { stub28_seq = Object.keys(stub28_seq);}
    for (stub29_itr = 0; stub29_itr < stub28_seq.length; stub29_itr += 1) {
        row = stub28_seq[stub29_itr];
        value = row[key];
        text = amount(value, (shares)? (SECONDS) : (BYTES));
        if ((((row["method"]!=(rows[0]["method"]))) && shares)) {
            text = percent(overhead(row, rows[0], key));
        }
        if ((((row["method"]!=(rows[0]["method"]))) && (key=="cache_bytes"))) {
            text = amount(value - (rows[0][key]), BYTES);
        }
        if (shares) {
            value = overhead(row, rows[0], key);
        }
        if ((key=="cache_bytes")) {
            value = value - (rows[0][key]);
        }
        _pymeth_append.call(given, (({method: row["method"], name: tables["methods"][row["method"]]["name"], value: value, text: text, tone: tone_of(tables, row, goal, limit)})));
    }
    return given;
};

points_of = function flx_points_of (tables, rows, goal, limit) {
    var given, name, over, row, share, stub30_seq, stub31_itr;
    given = [];
    stub30_seq = with_control(rows[0], ranked(tables, rows, "all"));
    if ((typeof stub30_seq === "object") && (!Array.isArray(stub30_seq))) { stub30_seq = Object.keys(stub30_seq);}
    for (stub31_itr = 0; stub31_itr < stub30_seq.length; stub31_itr += 1) {
        row = stub30_seq[stub31_itr];
        share = overhead(row, rows[0], "step_seconds");
        name = tables["methods"][row["method"]]["name"];
        over = ((row["memory_bytes"] > limit))? (", over the limit") : ("");
        _pymeth_append.call(given, (({method: row["method"], name: name, x: share, y: row["memory_bytes"], tip: ((((name + ": ") + percent(share)) + " more seconds, ") + amount(row["memory_bytes"], BYTES)) + over, tone: tone_of(tables, row, goal, limit)})));
    }
    return given;
};

figure = function flx_figure (tables, choice, rows, step, view, name, width) {
    var chosen, goal, key, label, limit, row, said, series, shown, stub32_seq, stub33_itr;
    chosen = view["chosen"];
    goal = view["goal"];
    limit = limit_of(tables, choice);
    label = tables["methods"][chosen]["name"];
    if ((name=="timeline")) {
        said = "Timeline of a training step with " + label;
        return steps(step["simulation"], choice["virtual"], choice["microbatches"], said, width);
    }
    if ((name=="state")) {
        series = [];
        stub32_seq = rows;
        if ((typeof stub32_seq === "object") && (!Array.isArray(stub32_seq))) { stub32_seq = Object.keys(stub32_seq);}
        for (stub33_itr = 0; stub33_itr < stub32_seq.length; stub33_itr += 1) {
            row = stub32_seq[stub33_itr];
            _pymeth_append.call(series, (({method: row["method"], name: tables["methods"][row["method"]]["name"], values: row["states"], tone: tone_of(tables, row, goal, limit)})));
        }
        return lines(series, chosen, "Bytes per token of the depth state along the stack; the numbers are in the table", width);
    }
    if ((name=="front")) {
        said = "Overhead of a training step against memory, a point for each method; the numbers are in the table";
        return points(points_of(tables, rows, goal, limit), chosen, limit, limit_text(tables, choice), said, width);
    }
    key = name + ((((name=="step") || (name=="token")))? ("_seconds") : ("_bytes"));
    shown = ((name=="memory"))? (limit) : (0);
    said = "Bars of all methods, from the shortest training step to the longest; the numbers are in the table";
    return bars(bars_of(tables, rows, key, goal, limit), chosen, shown, limit_text(tables, choice), said, width);
};

facts = function flx_facts (choice, rows, step, view) {
    var found, row, stub34_seq, stub35_itr;
    found = ({row: rows[0]});
    stub34_seq = rows;
    if ((typeof stub34_seq === "object") && (!Array.isArray(stub34_seq))) { stub34_seq = Object.keys(stub34_seq);}
    for (stub35_itr = 0; stub35_itr < stub34_seq.length; stub35_itr += 1) {
        row = stub34_seq[stub35_itr];
        if ((row["method"]==view["chosen"])) {
            found["row"] = row;
        }
    }
    row = found["row"];
    return [["devices", _pyfunc_str(gpus_of(choice))], ["tokens in a step", amount(choice["batch"] * choice["tokens"], COUNTS)], ["step of the control", amount(rows[0]["step_seconds"], SECONDS)], ["step of the method", amount(row["step_seconds"], SECONDS)], ["overhead", percent(overhead(row, rows[0], "step_seconds"))], ["tokens a second", amount(row["tokens_per_second"], COUNTS)], ["bubble", percent(step["bubble"])], ["exposed communication", amount(step["exposed_seconds"], SECONDS)]];
};

overhead = function flx_overhead (row, control, key) {
    return (row[key] / control[key]) - 1;
};

best_rows = function flx_best_rows (tables, choice, rows, view) {
    var cells, drawn, limit, row, stub36_, stub36_i0, stub36_iter0, stub36_row, stub37_seq, stub38_itr, within;
    limit = limit_of(tables, choice);
    stub36_ = [];stub36_iter0 = ranked(tables, rows, view["goal"]);if ((typeof stub36_iter0 === "object") && (!Array.isArray(stub36_iter0))) {stub36_iter0 = Object.keys(stub36_iter0);}for (stub36_i0=0; stub36_i0<stub36_iter0.length; stub36_i0++) {stub36_row = stub36_iter0[stub36_i0];if (!((stub36_row["memory_bytes"] <= limit))) {continue;}{stub36_.push(stub36_row);}}
    within = stub36_;
    drawn = "";
    stub37_seq = with_control(rows[0], within.slice(0,8));
    if ((typeof stub37_seq === "object") && (!Array.isArray(stub37_seq))) { stub37_seq = Object.keys(stub37_seq);}
    for (stub38_itr = 0; stub38_itr < stub37_seq.length; stub38_itr += 1) {
        row = stub37_seq[stub38_itr];
        cells = [percent(overhead(row, rows[0], "step_seconds")), amount(row["memory_bytes"], BYTES), percent(overhead(row, rows[0], "token_seconds")), amount(row["params"] - (rows[0]["params"]), COUNTS)];
        drawn = drawn + table_row(row, tables["methods"][row["method"]]["name"], cells, view["chosen"], limit);
    }
    return drawn;
};

table_row = function flx_table_row (row, name, cells, chosen, limit) {
    var cell, drawn, state, stub39_seq, stub40_itr;
    state = (((row["method"]==chosen))? ("chosen ") : ("")) + (((row["memory_bytes"] > limit))? ("over") : (""));
    drawn = (((((("<tr class=\"") + state) + ("\" data-method=\"")) + _pyfunc_str(row["method"])) + ("\"><th scope=\"row\">")) + name) + "</th>";
    stub39_seq = cells;
    if ((typeof stub39_seq === "object") && (!Array.isArray(stub39_seq))) { stub39_seq = Object.keys(stub39_seq);}
    for (stub40_itr = 0; stub40_itr < stub39_seq.length; stub40_itr += 1) {
        cell = stub39_seq[stub40_itr];
        drawn = ((drawn + ("<td class=\"number\">")) + cell) + "</td>";
    }
    return drawn + "</tr>";
};

table_rows = function flx_table_rows (tables, choice, rows, view) {
    var cells, control, drawn, limit, row, stub41_seq, stub42_itr;
    control = rows[0];
    limit = limit_of(tables, choice);
    drawn = "";
    stub41_seq = sorted_by(rows, "step_seconds");
    if ((typeof stub41_seq === "object") && (!Array.isArray(stub41_seq))) { stub41_seq = Object.keys(stub41_seq);}
    for (stub42_itr = 0; stub42_itr < stub41_seq.length; stub42_itr += 1) {
        row = stub41_seq[stub42_itr];
        cells = [amount(row["params"] - control["params"], COUNTS), amount(row["step_seconds"], SECONDS), percent(overhead(row, control, "step_seconds")), amount(row["depth_seconds"], SECONDS), amount(row["exposed_seconds"], SECONDS), amount(row["memory_bytes"], BYTES) + (((row["memory_bytes"] > limit))? (" over") : ("")), amount(row["sent_bytes"], BYTES), amount(row["token_seconds"], SECONDS), percent(overhead(row, control, "token_seconds")), amount(row["cache_bytes"], BYTES), amount(row["prompt_seconds"], SECONDS), amount(row["prompt_state_bytes"], BYTES)];
        drawn = drawn + table_row(row, tables["methods"][row["method"]]["name"], cells, view["chosen"], limit);
    }
    return drawn;
};

harmonic_size = function flx_harmonic_size (rows, inner, columns) {
    return 1.0 / (((1.0 / rows) + (1.0 / inner)) + (1.0 / columns));
};

matmul_efficiency = function flx_matmul_efficiency (size, half_size) {
    return size / (size + half_size);
};

operator = function flx_operator (matmul_flops, size, vector_flops, bytes_moved, kernels) {
    return ({matmul_flops: matmul_flops, size: size, vector_flops: vector_flops, bytes: bytes_moved, kernels: kernels});
};

compute_seconds = function flx_compute_seconds (op, rates) {
    var reached, seconds;
    seconds = op["vector_flops"] / rates["vector_flops_per_second"];
    if ((op["matmul_flops"] > 0)) {
        reached = rates["flops_per_second"] * matmul_efficiency(op["size"], rates["matmul_half_size"]);
        seconds = seconds + (op["matmul_flops"] / reached);
    }
    return seconds;
};

memory_seconds = function flx_memory_seconds (bytes_moved, rates) {
    var cache, rate, stub43_seq, stub44_itr;
    rate = rates["bytes_per_second"];
    stub43_seq = rates["caches"];
    if ((typeof stub43_seq === "object") && (!Array.isArray(stub43_seq))) { stub43_seq = Object.keys(stub43_seq);}
    for (stub44_itr = 0; stub44_itr < stub43_seq.length; stub44_itr += 1) {
        cache = stub43_seq[stub44_itr];
        if ((bytes_moved <= cache[0])) {
            rate = Math.max(rate, cache[1]);
        }
    }
    return bytes_moved / rate;
};

launch_seconds = function flx_launch_seconds (op, rates) {
    return op["kernels"] * rates["launch_seconds"];
};

operator_seconds = function flx_operator_seconds (op, rates) {
    return (Math.max(compute_seconds(op, rates), memory_seconds(op["bytes"], rates))) + launch_seconds(op, rates);
};

total_seconds = function flx_total_seconds (operators, rates) {
    var op, seconds, stub45_seq, stub46_itr;
    seconds = 0.0;
    stub45_seq = operators;
    if ((typeof stub45_seq === "object") && (!Array.isArray(stub45_seq))) { stub45_seq = Object.keys(stub45_seq);}
    for (stub46_itr = 0; stub46_itr < stub45_seq.length; stub46_itr += 1) {
        op = stub45_seq[stub46_itr];
        seconds = seconds + operator_seconds(op, rates);
    }
    return seconds;
};

fused = function flx_fused (operators, least_bytes) {
    var matmul_flops, op, size, stub47_seq, stub48_itr, surface, vector_flops;
    matmul_flops = 0.0;
    vector_flops = 0.0;
    surface = 0.0;
    stub47_seq = operators;
    if ((typeof stub47_seq === "object") && (!Array.isArray(stub47_seq))) { stub47_seq = Object.keys(stub47_seq);}
    for (stub48_itr = 0; stub48_itr < stub47_seq.length; stub48_itr += 1) {
        op = stub47_seq[stub48_itr];
        matmul_flops = matmul_flops + op["matmul_flops"];
        vector_flops = vector_flops + op["vector_flops"];
        if ((op["matmul_flops"] > 0)) {
            surface = surface + (op["matmul_flops"] / op["size"]);
        }
    }
    size = 0.0;
    if ((matmul_flops > 0)) {
        size = matmul_flops / surface;
    }
    return operator(matmul_flops, size, vector_flops, least_bytes, 1.0);
};

bound = function flx_bound (op, rates) {
    var compute, memory;
    compute = compute_seconds(op, rates);
    memory = memory_seconds(op["bytes"], rates);
    return bound_by(compute, memory, launch_seconds(op, rates), 0.0);
};

bound_by = function flx_bound_by (compute, memory, launch, link) {
    var largest, name;
    name = "compute";
    largest = compute;
    if ((memory > largest)) {
        name = "memory";
        largest = memory;
    }
    if ((launch > largest)) {
        name = "launch";
        largest = launch;
    }
    if ((link > largest)) {
        name = "link";
    }
    return name;
};

MIXER_KERNELS = 8;
DEPTH_KERNELS = 2;
PRODUCT_COLUMNS = 64;
tokens_on_rank = function flx_tokens_on_rank (work) {
    var share;
    share = ((work["sequence"]=="tensor"))? (work["tensor"]) : (1);
    return (work["batch"] * work["tokens"]) / share;
};

pairs_of_work = function flx_pairs_of_work (sub, work) {
    var step, total;
    if ((work["context"] > 0)) {
        total = 0;
        for (step = 0; step < work["tokens"]; step += 1) {
            total = total + pair_flops_of_one(sub, work["context"] + step);
        }
        return work["batch"] * total;
    }
    return work["batch"] * pair_flops(sub, work["tokens"]);
};

weights_read = function flx_weights_read (sub, tokens) {
    var experts, idle;
    if (((sub["routed"].length)==0)) {
        return sub["params"] - sub["tables"];
    }
    experts = sub["routed"][0];
    idle = experts * (Math.pow((1 - ((sub["routed"][1]) / experts)), tokens));
    return (sub["params"] - sub["tables"]) - (idle * (sub["routed"][2]));
};

cache_read = function flx_cache_read (sub, work) {
    var part, stub49_seq, stub50_itr, total;
    if ((work["context"]==0)) {
        return 0;
    }
    total = sub["cache_fixed"];
    stub49_seq = sub["cache"];
    if ((typeof stub49_seq === "object") && (!Array.isArray(stub49_seq))) { stub49_seq = Object.keys(stub49_seq);}
    for (stub50_itr = 0; stub50_itr < stub49_seq.length; stub50_itr += 1) {
        part = stub49_seq[stub50_itr];
        total = total + (part[0] * (((part[1]==0))? (work["context"]) : (Math.min(part[1], work["context"]))));
    }
    return total * work["batch"];
};

mixer_operators = function flx_mixer_operators (model, sub, work) {
    var D, N, between, kept, local, moved, rows, size, t, vector;
    N = work["batch"] * work["tokens"];
    t = work["tensor"];
    D = model["d_model"];
    rows = N;
    if (((sub["routed"].length) > 0)) {
        rows = Math.max(1, ((N * (sub["routed"][1])) / (sub["routed"][0])));
    }
    size = harmonic_size(rows, D, D / t);
    kept = (N * sub["saved"]) / t;
    local = (N * (sub["local"][1])) / t;
    moved = ((kept - local) + ((weights_read(sub, N) * model["weights_bytes"]) / t)) + (cache_read(sub, work) / t);
    between = (((tokens_on_rank(work) * D) * model["activations_bytes"]) * 2) * sub["norms"];
    vector = ((N * sub["elementwise"]) / t) + ((tokens_on_rank(work) * sub["norms"]) * model["norm_elementwise"]);
    return [operator((N * sub["matmul"]) / t, size, 0, moved, MIXER_KERNELS - 2), operator(pairs_of_work(sub, work) / t, harmonic_size(Math.max(work["tokens"], 16), D, D), 0, 0, 1), operator(0, 0, vector, (kept + local) + between, sub["norms"] + (sub["local"][0]))];
};

depth_operator = function flx_depth_operator (model, depth, work, way) {
    var D, N, columns, kernels, matmul, moved, size, times, vector, weights;
    N = tokens_on_rank(work);
    times = ((way=="forward"))? (1) : (2);
    vector = (times * N) * depth["elementwise"];
    matmul = times * ((N * depth["matmul"]) + depth["matmul_fixed"]);
    D = model["d_model"];
    size = harmonic_size(N, D, Math.max(1, (depth["matmul"] / (2 * D))));
    if ((work["engine"]=="eager")) {
        kernels = ((way=="forward"))? (depth["eager"]) : (depth["eager_back"]);
        return operator(matmul, size, vector, (N * kernels[1]) + kernels[2], kernels[0]);
    }
    moved = ((way=="forward"))? (depth["read"] + depth["written"]) : (depth["written"] + (2 * depth["read"]));
    weights = (times * depth["weights"]) * model["weights_bytes"];
    columns = (Math.min(depth["weights"], (depth["matmul"] / 2))) / D;
    return operator(matmul, size, vector, (N * moved) + weights, DEPTH_KERNELS + (((columns >= PRODUCT_COLUMNS))? (2) : (0)));
};

collective_seconds = function flx_collective_seconds (sent_bytes, link) {
    if ((sent_bytes <= 0)) {
        return 0;
    }
    return (sent_bytes / link["bytes_per_second"]) + link["latency_seconds"];
};

sublayer_seconds = function flx_sublayer_seconds (model, sub, work, rates, link) {
    var N, backward, both, depth, depth_back, forward, op, sent, stub51_seq, stub52_itr, twice;
    forward = 0;
    backward = 0;
    stub51_seq = mixer_operators(model, sub, work);
    if ((typeof stub51_seq === "object") && (!Array.isArray(stub51_seq))) { stub51_seq = Object.keys(stub51_seq);}
    for (stub52_itr = 0; stub52_itr < stub51_seq.length; stub52_itr += 1) {
        op = stub51_seq[stub52_itr];
        forward = forward + operator_seconds(op, rates);
        twice = operator(2 * op["matmul_flops"], op["size"], 2 * op["vector_flops"], 2 * op["bytes"], 2 * op["kernels"]);
        backward = backward + operator_seconds(twice, rates);
    }
    depth = operator_seconds(depth_operator(model, sub["depth"], work, "forward"), rates);
    depth_back = operator_seconds(depth_operator(model, sub["depth"], work, "backward"), rates);
    N = work["batch"] * work["tokens"];
    sent = tensor_parallel_forward_bytes(work["tensor"], 1, N, model["d_model"], model["activations_bytes"]);
    both = tensor_parallel_bytes(work["tensor"], 1, N, model["d_model"], model["activations_bytes"], work["sequence"]);
    return ({forward: forward, backward: backward, depth: depth, depth_back: depth_back, link: collective_seconds(sent, link), link_back: collective_seconds(both - sent, link)});
};

head_seconds = function flx_head_seconds (model, work, rates) {
    var D, N, V, head, head_back, moved;
    N = work["batch"] * work["tokens"];
    D = model["d_model"];
    V = model["vocab_size"] / work["tensor"];
    moved = ((D * V) * model["weights_bytes"]) + (((2 * N) * V) * model["activations_bytes"]);
    head = operator(((2 * N) * D) * V, harmonic_size(N, D, V), 0, moved, 3);
    head_back = operator(((4 * N) * D) * V, harmonic_size(N, D, V), 0, 2 * moved, 6);
    return ({forward: operator_seconds(head, rates), backward: operator_seconds(head_back, rates), depth: operator_seconds(depth_operator(model, model["ends"], work, "forward"), rates), depth_back: operator_seconds(depth_operator(model, model["ends"], work, "backward"), rates), link: 0, link_back: 0});
};

gpus_of = function flx_gpus_of (choice) {
    return (choice["data"] * choice["pipeline"]) * choice["tensor"];
};

run_of = function flx_run_of (choice) {
    return ({batch: Math.floor(choice["batch"]/(choice["data"] * choice["microbatches"])), tokens: choice["tokens"], microbatches: choice["microbatches"], pipeline: choice["pipeline"], virtual: choice["virtual"], schedule: ((choice["virtual"] > 1))? ("interleaved") : (choice["schedule"]), transfers: choice["transfers"], forwarding: choice["forwarding"], data: choice["data"], sharding: choice["sharding"], recompute: choice["recompute"], tensor: choice["tensor"], sequence: sequence_of(choice), engine: "fused"});
};

sequence_of = function flx_sequence_of (choice) {
    return ((choice["tensor"] > 1))? (choice["sequence"]) : ("none");
};

work_of_prompts = function flx_work_of_prompts (choice, tokens, context, sequence) {
    return ({batch: choice["prompts"], tokens: tokens, context: context, tensor: choice["tensor"], sequence: sequence, engine: "fused"});
};

reach_of = function flx_reach_of (device, devices) {
    var index, most;
    for (index = 0; index < device["links"].length; index += 1) {
        most = device["links"][index][0];
        if (((most==0) || (devices <= most))) {
            return index;
        }
    }
    return -1;
};

link_of = function flx_link_of (device, devices) {
    if ((devices==1)) {
        return ({bytes_per_second: 1.0, pair_bytes_per_second: 1.0, latency_seconds: 0.0});
    }
    return device["links"][reach_of(device, devices)][1];
};

links_of = function flx_links_of (device, choice) {
    return ({tensor: link_of(device, choice["tensor"]), pipeline: link_of(device, choice["tensor"] * choice["pipeline"]), data: link_of(device, gpus_of(choice))});
};

refusal = function flx_refusal (choice, device, n_layers) {
    var parts;
    parts = choice["data"] * choice["microbatches"];
    if (((choice["batch"] % parts) > 0)) {
        return ((("A batch of " + _pyfunc_str(choice["batch"])) + " does not divide by replicas x microbatches = ") + _pyfunc_str(parts)) + ".";
    }
    if (((choice["virtual"] > 1) && (choice["pipeline"]==1))) {
        return "Several stages on each rank need more than one pipeline rank.";
    }
    if (((choice["virtual"] > 1) && (choice["schedule"]=="gpipe"))) {
        return "GPipe runs one stage on each rank; choose 1F1B, or one stage.";
    }
    if (((choice["virtual"] > 1) && (((choice["microbatches"] % choice["pipeline"]) > 0)))) {
        return "With several stages on each rank, microbatches have to be a multiple of the pipeline ranks.";
    }
    if (((choice["pipeline"] * choice["virtual"]) > n_layers)) {
        return ("There are more stages than the " + _pyfunc_str(n_layers)) + " blocks of the model; choose fewer.";
    }
    if ((((sequence_of(choice)=="tensor")) && (((choice["tokens"] % choice["tensor"]) > 0)))) {
        return "The tokens do not divide by the tensor ranks that share them.";
    }
    if ((((gpus_of(choice) > 1)) && (((reach_of(device, gpus_of(choice))) < 0)))) {
        return ("No link in the file of this device connects " + (_pyfunc_str(gpus_of(choice)))) + " of them; choose fewer.";
    }
    return "";
};

unpacked = function flx_unpacked (tables, pack, window) {
    var entry, model, row, stub53_seq, stub54_itr, sublayer;
    model = copied(tables["shared"]);
    model["n_layers"] = pack["n_layers"];
    model["ends"] = pack["ends"];
    model["leaves"] = pack["leaves"];
    model["sublayers"] = [];
    stub53_seq = pack["sublayers"];
    if ((typeof stub53_seq === "object") && (!Array.isArray(stub53_seq))) { stub53_seq = Object.keys(stub53_seq);}
    for (stub54_itr = 0; stub54_itr < stub53_seq.length; stub54_itr += 1) {
        entry = stub53_seq[stub54_itr];
        row = entry[1];
        if ((entry[3] >= 0)) {
            row = tables["families"][entry[3]][place_of(tables["windows"], window)];
        }
        sublayer = copied(tables["rows"][row]);
        sublayer["block"] = entry[0];
        sublayer["depth"] = tables["depths"][entry[2]];
        _pymeth_append.call(model["sublayers"], sublayer);
    }
    return model;
};

copied = function flx_copied (table) {
    var found, name, stub55_seq, stub56_itr;
    found = ({});
    stub55_seq = table;
    if ((typeof stub55_seq === "object") && (!Array.isArray(stub55_seq))) { stub55_seq = Object.keys(stub55_seq);}
    for (stub56_itr = 0; stub56_itr < stub55_seq.length; stub56_itr += 1) {
        name = stub55_seq[stub56_itr];
        found[name] = table[name];
    }
    return found;
};

place_of = function flx_place_of (values, value) {
    var index;
    for (index = 0; index < values.length; index += 1) {
        if ((values[index]==value)) {
            return index;
        }
    }
    return -1;
};

model_of = function flx_model_of (tables, choice, method, phase) {
    var packs;
    packs = tables["models"][choice["layers"]][method];
    return unpacked(tables, tables["packs"][packs[((phase=="training"))? (0) : (1)]], choice["window"]);
};

step_of = function flx_step_of (tables, choice, method) {
    var device;
    device = tables["devices"][choice["device"]];
    return training_step(model_of(tables, choice, method, "training"), run_of(choice), device["rates"], links_of(device, choice));
};

states_of = function flx_states_of (model) {
    return (function list_comprehension (iter0) {var res = [];var boundary, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {boundary = iter0[i0];{res.push(state_bytes(model, boundary));}}return res;}).call(this, _pyfunc_range(0, ((model["sublayers"].length) + 1), 1));
};

method_row = function flx_method_row (tables, choice, method) {
    var device, generating, held_bytes, hop, links, memory, model, prompt, read, sent, step, stub57_seq, stub58_itr, stub59_seq, stub60_itr, token;
    device = tables["devices"][choice["device"]];
    links = links_of(device, choice);
    model = model_of(tables, choice, method, "training");
    step = training_step(model, run_of(choice), device["rates"], links);
    memory = 0;
    stub57_seq = step["memory_bytes"];
    if ((typeof stub57_seq === "object") && (!Array.isArray(stub57_seq))) { stub57_seq = Object.keys(stub57_seq);}
    for (stub58_itr = 0; stub58_itr < stub57_seq.length; stub58_itr += 1) {
        held_bytes = stub57_seq[stub58_itr];
        memory = Math.max(memory, held_bytes);
    }
    sent = 0;
    stub59_seq = step["sent_bytes"];
    if ((typeof stub59_seq === "object") && (!Array.isArray(stub59_seq))) { stub59_seq = Object.keys(stub59_seq);}
    for (stub60_itr = 0; stub60_itr < stub59_seq.length; stub60_itr += 1) {
        hop = stub59_seq[stub60_itr];
        sent = Math.max(sent, hop);
    }
    generating = model_of(tables, choice, method, "generation");
    token = forward_pass(generating, work_of_prompts(choice, 1, choice["tokens"], "none"), device["rates"], links["tensor"]);
    prompt = work_of_prompts(choice, choice["tokens"], 0, sequence_of(choice));
    read = forward_pass(model, prompt, device["rates"], links["tensor"]);
    return ({method: method, step_seconds: step["step_seconds"], tokens_per_second: step["tokens_per_second"], depth_seconds: step["depth_seconds"], exposed_seconds: step["exposed_seconds"], bubble: step["bubble"], memory_bytes: memory, sent_bytes: sent, params: parameter_counts(model)["all"], token_seconds: token["seconds"], token_depth_seconds: token["depth_seconds"], cache_bytes: cache_bytes_of(generating, choice["tokens"], 1), prompt_seconds: read["seconds"], prompt_state_bytes: prefill_state_bytes(model, prompt, 0), states: states_of(model)});
};

methods_of = function flx_methods_of (tables, choice) {
    var fitting, ranks;
    fitting = tables["models"][choice["layers"]];
    ranks = choice["tensor"];
    return (function list_comprehension (iter0) {var res = [];var m, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {m = iter0[i0];if (!(((((fitting[m].length) > 0)) && ((place_of(tables["tensor"][m], ranks) >= 0))))) {continue;}{res.push(m);}}return res;}).call(this, _pyfunc_range(0, fitting.length, 1));
};

sorted_by = function flx_sorted_by (rows, key) {
    var at, found, row, stub61_, stub61_i, stub61_i0, stub61_iter0, stub62_seq, stub63_itr;
    found = [];
    stub62_seq = rows;
    if ((typeof stub62_seq === "object") && (!Array.isArray(stub62_seq))) { stub62_seq = Object.keys(stub62_seq);}
    for (stub63_itr = 0; stub63_itr < stub62_seq.length; stub63_itr += 1) {
        row = stub62_seq[stub63_itr];
        at = found.length;
        while ((at > 0) && (((found[at - 1][key]) > row[key]))) {
            at = at - 1;
        }
        stub61_ = [];stub61_iter0 = _pyfunc_range(0, (found.length + 1), 1);if ((typeof stub61_iter0 === "object") && (!Array.isArray(stub61_iter0))) {stub61_iter0 = Object.keys(stub61_iter0);}for (stub61_i0=0; stub61_i0<stub61_iter0.length; stub61_i0++) {stub61_i = stub61_iter0[stub61_i0];{stub61_.push(((stub61_i < at))? (found[stub61_i]) : (((stub61_i==at))? (row) : (found[stub61_i - 1])));}}
        found = stub61_;
    }
    return found;
};

gpipe_order = function flx_gpipe_order (ranks, microbatches) {
    var backwards, forwards, order, rank, stub64_, stub64_i0, stub64_iter0, stub64_microbatch, stub65_, stub65_i0, stub65_iter0, stub65_microbatch;
    order = [];
    for (rank = 0; rank < ranks; rank += 1) {
        stub64_ = [];stub64_iter0 = _pyfunc_range(0, microbatches, 1);if ((typeof stub64_iter0 === "object") && (!Array.isArray(stub64_iter0))) {stub64_iter0 = Object.keys(stub64_iter0);}for (stub64_i0=0; stub64_i0<stub64_iter0.length; stub64_i0++) {stub64_microbatch = stub64_iter0[stub64_i0];{stub64_.push(["forward", rank, stub64_microbatch]);}}
        forwards = stub64_;
        stub65_ = [];stub65_iter0 = _pyfunc_range(0, microbatches, 1);if ((typeof stub65_iter0 === "object") && (!Array.isArray(stub65_iter0))) {stub65_iter0 = Object.keys(stub65_iter0);}for (stub65_i0=0; stub65_i0<stub65_iter0.length; stub65_i0++) {stub65_microbatch = stub65_iter0[stub65_i0];{stub65_.push(["backward", rank, stub65_microbatch]);}}
        backwards = stub65_;
        _pymeth_append.call(order, joined(forwards, backwards));
    }
    return order;
};

one_f_one_b_order = function flx_one_f_one_b_order (ranks, microbatches) {
    var actions, ahead, microbatch, order, rank, stub66_, stub66_i0, stub66_iter0, stub66_microbatch;
    order = [];
    for (rank = 0; rank < ranks; rank += 1) {
        ahead = Math.min(((ranks - 1) - rank), microbatches);
        stub66_ = [];stub66_iter0 = _pyfunc_range(0, ahead, 1);if ((typeof stub66_iter0 === "object") && (!Array.isArray(stub66_iter0))) {stub66_iter0 = Object.keys(stub66_iter0);}for (stub66_i0=0; stub66_i0<stub66_iter0.length; stub66_i0++) {stub66_microbatch = stub66_iter0[stub66_i0];{stub66_.push(["forward", rank, stub66_microbatch]);}}
        actions = stub66_;
        for (microbatch = ahead; microbatch < microbatches; microbatch += 1) {
            _pymeth_append.call(actions, ["forward", rank, microbatch]);
            _pymeth_append.call(actions, ["backward", rank, microbatch - ahead]);
        }
        for (microbatch = microbatches - ahead; microbatch < microbatches; microbatch += 1) {
            _pymeth_append.call(actions, ["backward", rank, microbatch]);
        }
        _pymeth_append.call(order, actions);
    }
    return order;
};

interleaved_order = function flx_interleaved_order (ranks, virtual, microbatches) {
    var actions, ahead, backwards, each, forwards, microbatch, order, rank, step, total, turn;
    each = Math.floor(microbatches/(Math.max(1, Math.floor(microbatches/ranks))));
    total = virtual * microbatches;
    order = [];
    for (rank = 0; rank < ranks; rank += 1) {
        forwards = [];
        backwards = [];
        for (step = 0; step < total; step += 1) {
            turn = Math.floor(step/each) % virtual;
            microbatch = ((Math.floor(step/(each * virtual))) * each) + (step % each);
            _pymeth_append.call(forwards, ["forward", (turn * ranks) + rank, microbatch]);
            _pymeth_append.call(backwards, ["backward", (((virtual - 1) - turn) * ranks) + rank, microbatch]);
        }
        ahead = Math.min((((virtual - 1) * each) + (2 * ((ranks - 1) - rank))), total);
        actions = forwards.slice(0,ahead);
        for (step = 0; step < total - ahead; step += 1) {
            _pymeth_append.call(actions, forwards[ahead + step]);
            _pymeth_append.call(actions, backwards[step]);
        }
        _pymeth_append.call(order, (joined(actions, backwards.slice(total - ahead))));
    }
    return order;
};

schedule_order = function flx_schedule_order (schedule, ranks, virtual, microbatches) {
    if ((schedule=="gpipe")) {
        return gpipe_order(ranks, microbatches);
    }
    if ((schedule=="1f1b")) {
        return one_f_one_b_order(ranks, microbatches);
    }
    return interleaved_order(ranks, virtual, microbatches);
};

joined = function flx_joined (first, second) {
    return (function list_comprehension (iter0) {var res = [];var part, i0, item, i1, iter1;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {part = iter0[i0];iter1 = part;if ((typeof iter1 === "object") && (!Array.isArray(iter1))) {iter1 = Object.keys(iter1);}for (i1=0; i1<iter1.length; i1++) {item = iter1[i1];{res.push(item);}}}return res;}).call(this, [first, second]);
};

ideal_bubble = function flx_ideal_bubble (ranks, virtual, microbatches) {
    return (ranks - 1) / (((virtual * microbatches) + ranks) - 1);
};

transfer_seconds = function flx_transfer_seconds (sent_bytes, bytes_per_second, latency_seconds) {
    return ((sent_bytes > 0))? (latency_seconds + (sent_bytes / bytes_per_second)) : (0.0);
};

simulate = function flx_simulate (order, forward_seconds, backward_seconds, activation_seconds, gradient_seconds, transfers) {
    var clock, done, moved, rank, ranks, stub67_, stub67__, stub67_i0, stub67_iter0, stub68_, stub68__, stub68_i0, stub68_iter0, unfinished;
    ranks = order.length;
    clock = ({stages: forward_seconds.length, seconds: ({forward: forward_seconds, backward: backward_seconds}), link_seconds: ({forward: activation_seconds, backward: gradient_seconds}), arrived: ({forward: _never(order, forward_seconds.length), backward: _never(order, forward_seconds.length)}), link_free: (function list_comprehension (iter0) {var res = [];var _, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {_ = iter0[i0];{res.push((function list_comprehension (iter0) {var res = [];var _, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {_ = iter0[i0];{res.push(0.0);}}return res;}).call(this, _pyfunc_range(0, ranks, 1)));}}return res;}).call(this, _pyfunc_range(0, ranks, 1)), rank_free: (function list_comprehension (iter0) {var res = [];var _, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {_ = iter0[i0];{res.push(0.0);}}return res;}).call(this, _pyfunc_range(0, ranks, 1)), actions: [], transfers: []});
    stub67_ = [];stub67_iter0 = clock["arrived"]["forward"][0];if ((typeof stub67_iter0 === "object") && (!Array.isArray(stub67_iter0))) {stub67_iter0 = Object.keys(stub67_iter0);}for (stub67_i0=0; stub67_i0<stub67_iter0.length; stub67_i0++) {stub67__ = stub67_iter0[stub67_i0];{stub67_.push(0.0);}}
    clock["arrived"]["forward"][0] = stub67_;
    stub68_ = [];stub68_iter0 = _pyfunc_range(0, ranks, 1);if ((typeof stub68_iter0 === "object") && (!Array.isArray(stub68_iter0))) {stub68_iter0 = Object.keys(stub68_iter0);}for (stub68_i0=0; stub68_i0<stub68_iter0.length; stub68_i0++) {stub68__ = stub68_iter0[stub68_i0];{stub68_.push(0);}}
    done = stub68_;
    moved = true;
    while (moved) {
        moved = false;
        for (rank = 0; rank < ranks; rank += 1) {
            while (((done[rank] < (order[rank].length))) && ((_arrival(clock, order[rank][done[rank]]) >= 0))) {
                _run(clock, rank, order[rank][done[rank]], transfers);
                done[rank] += 1;
                moved = true;
            }
        }
    }
    unfinished = 0;
    for (rank = 0; rank < ranks; rank += 1) {
        unfinished += (order[rank].length) - done[rank];
    }
    return _summary(clock, ranks, unfinished);
};

_never = function flx__never (order, stages) {
    var action, actions, microbatches, stub69_seq, stub70_itr, stub71_seq, stub72_itr;
    microbatches = 0;
    stub71_seq = order;
    if ((typeof stub71_seq === "object") && (!Array.isArray(stub71_seq))) { stub71_seq = Object.keys(stub71_seq);}
    for (stub72_itr = 0; stub72_itr < stub71_seq.length; stub72_itr += 1) {
        actions = stub71_seq[stub72_itr];
        stub69_seq = actions;
        if ((typeof stub69_seq === "object") && (!Array.isArray(stub69_seq))) { stub69_seq = Object.keys(stub69_seq);}
        for (stub70_itr = 0; stub70_itr < stub69_seq.length; stub70_itr += 1) {
            action = stub69_seq[stub70_itr];
            microbatches = Math.max(microbatches, (action[2] + 1));
        }
    }
    return (function list_comprehension (iter0) {var res = [];var _, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {_ = iter0[i0];{res.push((function list_comprehension (iter0) {var res = [];var _, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {_ = iter0[i0];{res.push(-1.0);}}return res;}).call(this, _pyfunc_range(0, microbatches, 1)));}}return res;}).call(this, _pyfunc_range(0, stages, 1));
};

_arrival = function flx__arrival (clock, action) {
    return clock["arrived"][action[0]][action[1]][action[2]];
};

_run = function flx__run (clock, rank, action, transfers) {
    var begin, boundary, end, kind, microbatch, over, receiver, stage, start, target;
    kind = action[0];
    stage = action[1];
    microbatch = action[2];
    start = Math.max((clock["rank_free"][rank]), _arrival(clock, action));
    end = start + (clock["seconds"][kind][stage]);
    _pymeth_append.call(clock["actions"], ({rank: rank, kind: kind, stage: stage, microbatch: microbatch, start: start, end: end}));
    clock["rank_free"][rank] = end;
    if (((kind=="forward") && ((stage==(clock["stages"] - 1))))) {
        clock["arrived"]["backward"][stage][microbatch] = end;
        return null;
    }
    if (((kind=="backward") && (stage==0))) {
        return null;
    }
    receiver = ((kind=="forward"))? (stage + 1) : (stage - 1);
    target = receiver % (clock["rank_free"].length);
    if ((target==rank)) {
        clock["arrived"][kind][receiver][microbatch] = end;
        return null;
    }
    boundary = Math.min(stage, receiver);
    begin = Math.max(end, (clock["link_free"][rank][target]));
    over = begin + (clock["link_seconds"][kind][boundary]);
    _pymeth_append.call(clock["transfers"], ({source: rank, target: target, kind: kind, boundary: boundary, microbatch: microbatch, start: begin, end: over}));
    clock["link_free"][rank][target] = over;
    clock["arrived"][kind][receiver][microbatch] = over;
    if ((transfers=="blocking")) {
        clock["rank_free"][rank] = over;
    }
    return null;
};

_summary = function flx__summary (clock, ranks, unfinished) {
    var action, bubble, busy, idle, share, step, stub73_, stub73__, stub73_i0, stub73_iter0, stub74_seq, stub75_itr, stub76_, stub76_i0, stub76_iter0, stub76_seconds, stub77_seq, stub78_itr;
    step = 0.0;
    stub73_ = [];stub73_iter0 = _pyfunc_range(0, ranks, 1);if ((typeof stub73_iter0 === "object") && (!Array.isArray(stub73_iter0))) {stub73_iter0 = Object.keys(stub73_iter0);}for (stub73_i0=0; stub73_i0<stub73_iter0.length; stub73_i0++) {stub73__ = stub73_iter0[stub73_i0];{stub73_.push(0.0);}}
    busy = stub73_;
    stub74_seq = clock["actions"];
    if ((typeof stub74_seq === "object") && (!Array.isArray(stub74_seq))) { stub74_seq = Object.keys(stub74_seq);}
    for (stub75_itr = 0; stub75_itr < stub74_seq.length; stub75_itr += 1) {
        action = stub74_seq[stub75_itr];
        step = Math.max(step, action["end"]);
        busy[action["rank"]] += action["end"] - action["start"];
    }
    stub76_ = [];stub76_iter0 = busy;if ((typeof stub76_iter0 === "object") && (!Array.isArray(stub76_iter0))) {stub76_iter0 = Object.keys(stub76_iter0);}for (stub76_i0=0; stub76_i0<stub76_iter0.length; stub76_i0++) {stub76_seconds = stub76_iter0[stub76_i0];{stub76_.push(((step > 0))? (1 - (stub76_seconds / step)) : (0.0));}}
    idle = stub76_;
    bubble = 0.0;
    stub77_seq = idle;
    if ((typeof stub77_seq === "object") && (!Array.isArray(stub77_seq))) { stub77_seq = Object.keys(stub77_seq);}
    for (stub78_itr = 0; stub78_itr < stub77_seq.length; stub78_itr += 1) {
        share = stub77_seq[stub78_itr];
        bubble += share / ranks;
    }
    return ({actions: clock["actions"], transfers: clock["transfers"], step_seconds: step, idle_share: idle, bubble: bubble, unfinished: unfinished});
};

exposed_seconds = function flx_exposed_seconds (order, forward_seconds, backward_seconds, activation_seconds, gradient_seconds, transfers) {
    var free, ideal, real, stub79_, stub79__, stub79_i0, stub79_iter0;
    stub79_ = [];stub79_iter0 = activation_seconds;if ((typeof stub79_iter0 === "object") && (!Array.isArray(stub79_iter0))) {stub79_iter0 = Object.keys(stub79_iter0);}for (stub79_i0=0; stub79_i0<stub79_iter0.length; stub79_i0++) {stub79__ = stub79_iter0[stub79_i0];{stub79_.push(0.0);}}
    free = stub79_;
    real = simulate(order, forward_seconds, backward_seconds, activation_seconds, gradient_seconds, transfers);
    ideal = simulate(order, forward_seconds, backward_seconds, free, free, transfers);
    return real["step_seconds"] - ideal["step_seconds"];
};

peak_memory = function flx_peak_memory (result, fixed_bytes, saved_bytes, activation_bytes, gradient_bytes, waiting_bytes) {
    var action, boundary_bytes, coming, held, kind, peak, peaks, rank, received, stage, stub80_, stub80_i0, stub80_iter0, stub80_sent, stub81_seq, stub82_itr, stub83_seq, stub84_itr, stub85_seq, stub86_itr;
    boundary_bytes = ({forward: activation_bytes, backward: gradient_bytes});
    peaks = [];
    for (rank = 0; rank < fixed_bytes.length; rank += 1) {
        coming = ({});
        stub81_seq = ["forward", "backward"];
        if ((typeof stub81_seq === "object") && (!Array.isArray(stub81_seq))) { stub81_seq = Object.keys(stub81_seq);}
        for (stub82_itr = 0; stub82_itr < stub81_seq.length; stub82_itr += 1) {
            kind = stub81_seq[stub82_itr];
            stub80_ = [];stub80_iter0 = result["transfers"];if ((typeof stub80_iter0 === "object") && (!Array.isArray(stub80_iter0))) {stub80_iter0 = Object.keys(stub80_iter0);}for (stub80_i0=0; stub80_i0<stub80_iter0.length; stub80_i0++) {stub80_sent = stub80_iter0[stub80_i0];if (!(((stub80_sent["target"]==rank) && (stub80_sent["kind"]==kind)))) {continue;}{stub80_.push(stub80_sent);}}
            coming[kind] = stub80_;
        }
        received = ({forward: 0, backward: 0});
        held = fixed_bytes[rank];
        peak = held;
        stub85_seq = (function list_comprehension (iter0) {var res = [];var action, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {action = iter0[i0];if (!(_pyfunc_op_equals(action["rank"], rank))) {continue;}{res.push(action);}}return res;}).call(this, result["actions"]);
        if ((typeof stub85_seq === "object") && (!Array.isArray(stub85_seq))) { stub85_seq = Object.keys(stub85_seq);}
        for (stub86_itr = 0; stub86_itr < stub85_seq.length; stub86_itr += 1) {
            action = stub85_seq[stub86_itr];
            stub83_seq = ["forward", "backward"];
            if ((typeof stub83_seq === "object") && (!Array.isArray(stub83_seq))) { stub83_seq = Object.keys(stub83_seq);}
            for (stub84_itr = 0; stub84_itr < stub83_seq.length; stub84_itr += 1) {
                kind = stub83_seq[stub84_itr];
                while (((received[kind] < (coming[kind].length))) && _begun(coming[kind][received[kind]], action)) {
                    held += boundary_bytes[kind][coming[kind][received[kind]]["boundary"]];
                    received[kind] += 1;
                }
            }
            stage = action["stage"];
            if ((action["kind"]=="forward")) {
                held += saved_bytes[stage];
            } else {
                held += waiting_bytes[0][stage];
            }
            peak = Math.max(peak, held);
            if ((action["kind"]=="backward")) {
                held -= saved_bytes[stage] + (waiting_bytes[1][stage]);
                if (((fixed_bytes.length > 1) && (stage > 0))) {
                    held -= activation_bytes[stage - 1];
                }
                if (((fixed_bytes.length > 1) && ((stage < (saved_bytes.length - 1))))) {
                    held -= gradient_bytes[stage];
                }
            }
        }
        _pymeth_append.call(peaks, peak);
    }
    return peaks;
};

_begun = function flx__begun (transfer, action) {
    return (transfer["start"] < action["end"]) || (transfer["start"] <= action["start"]);
};

ROW = 19;
RANK = 28;
bars = function flx_bars (given, chosen, limit, limit_text, label, width) {
    var bar, drawn, height, least, left, length, most, names, right, scale, start, stub87_seq, stub88_itr, stub89_seq, stub90_itr, tone, top, x, y, zero;
    names = 172;
    left = names;
    right = width - 58;
    least = 0;
    most = 0;
    stub87_seq = given;
    if ((typeof stub87_seq === "object") && (!Array.isArray(stub87_seq))) { stub87_seq = Object.keys(stub87_seq);}
    for (stub88_itr = 0; stub88_itr < stub87_seq.length; stub88_itr += 1) {
        bar = stub87_seq[stub88_itr];
        least = Math.min(least, bar["value"]);
        most = Math.max(most, bar["value"]);
    }
    limit = ((limit < (2 * most)))? (limit) : (0);
    most = Math.max(most, limit);
    scale = ((most > least))? ((right - left) / (most - least)) : (0);
    zero = left - (least * scale);
    top = ((limit > 0))? (18) : (2);
    height = (top + (ROW * given.length)) + 4;
    drawn = opening(width, height, label);
    if ((limit > 0)) {
        x = zero + (limit * scale);
        drawn = drawn + (text_at(x, 11, ((x > (width / 2)))? ("end") : ("start"), "limit", limit_text));
        drawn = drawn + line_at(x, top - 3, x, height - 2, "limit");
    }
    drawn = drawn + line_at(zero, top, zero, height - 2, "axis");
    y = top;
    stub89_seq = given;
    if ((typeof stub89_seq === "object") && (!Array.isArray(stub89_seq))) { stub89_seq = Object.keys(stub89_seq);}
    for (stub90_itr = 0; stub90_itr < stub89_seq.length; stub90_itr += 1) {
        bar = stub89_seq[stub90_itr];
        tone = bar["tone"] + (((bar["method"]==chosen))? (" chosen") : (""));
        start = Math.min(zero, (zero + (bar["value"] * scale)));
        length = Math.max(1, (_pyfunc_abs(bar["value"]) * scale));
        drawn = ((((drawn + ("<g class=\"bar ")) + tone) + ("\" data-method=\"")) + _pyfunc_str(bar["method"])) + ("\">");
        drawn = ((((((drawn + ("<rect class=\"reach\" x=\"0\" y=\"")) + place(y)) + ("\" width=\"")) + _pyfunc_str(width)) + ("\" height=\"")) + _pyfunc_str(ROW)) + ("\"/>");
        drawn = drawn + text_at(names - 8, y + 13.5, "end", "name", bar["name"]);
        drawn = drawn + box_at(start, y + 3, length, ROW - 6, "fill");
        drawn = (drawn + (text_at((Math.max(zero, (start + length))) + 5, y + 13.5, "start", "value", bar["text"]))) + "</g>";
        y = y + ROW;
    }
    return drawn + "</svg>";
};

points = function flx_points (given, chosen, limit, limit_text, label, width) {
    var axes, bottom, drawn, edge, height, high, index, least, left, low, margin, most, point, right, step, stub91_seq, stub92_itr, top, x, y;
    height = 340;
    left = 62;
    right = width - 16;
    top = 22;
    bottom = height - 42;
    low = given[0]["y"];
    high = given[0]["y"];
    least = 0;
    most = 0.01;
    stub91_seq = given;
    if ((typeof stub91_seq === "object") && (!Array.isArray(stub91_seq))) { stub91_seq = Object.keys(stub91_seq);}
    for (stub92_itr = 0; stub92_itr < stub91_seq.length; stub92_itr += 1) {
        point = stub91_seq[stub92_itr];
        low = Math.min(low, point["y"]);
        high = Math.max(high, point["y"]);
        least = Math.min(least, point["x"]);
        most = Math.max(most, point["x"]);
    }
    high = ((limit < (2 * high)))? (Math.max(high, limit)) : (high);
    margin = 0.06 * (Math.max((high - low), (0.02 * high)));
    axes = [left + 8, ((right - left) - 16) / (most - least), least, bottom, (bottom - top) / ((high - low) + (2 * margin)), low - margin];
    drawn = opening(width, height, label);
    edge = Math.max(top, (bottom - ((limit - axes[5]) * axes[4])));
    if ((edge > top)) {
        drawn = (drawn + box_at(left, top, right - left, edge - top, "beyond")) + line_at(left, edge, right, edge, "limit");
    }
    drawn = drawn + (text_at(right, 14, "end", "limit", (((edge > top))? ("shaded: over ") : ("the limit is above: ")) + limit_text));
    step = nice_step((high - low) + (2 * margin), 4);
    for (index = (_pyfunc_int((axes[5] / step))) + 1; index < (_pyfunc_int(((high + margin) / step))) + 1; index += 1) {
        y = bottom - (((index * step) - axes[5]) * axes[4]);
        drawn = (drawn + line_at(left, y, right, y, "grid")) + (text_at(left - 7, y + 4, "end", "tick", amount(index * step, BYTES)));
    }
    step = nice_step(most - least, ((width > 400))? (3) : (2));
    for (index = 0 - (_pyfunc_int((0 - (least / step)))); index < (_pyfunc_int((most / step))) + 1; index += 1) {
        x = axes[0] + (((index * step) - least) * axes[1]);
        drawn = (drawn + line_at(x, bottom, x, bottom + 4, "axis")) + (text_at(x, bottom + 17, "middle", "tick", percent(index * step)));
    }
    drawn = drawn + line_at(left, bottom, right, bottom, "axis");
    drawn = drawn + (text_at((left + right) / 2, height - 4, "middle", "tick", "seconds of a training step beyond the control"));
    return (drawn + all_points(given, chosen, axes, right)) + "</svg>";
};

all_points = function flx_all_points (given, chosen, axes, right) {
    var front, point, stub93_seq, stub94_itr, stub95_seq, stub96_itr, stub97_seq, stub98_itr, taken, x;
    front = "";
    taken = [];
    stub93_seq = given;
    if ((typeof stub93_seq === "object") && (!Array.isArray(stub93_seq))) { stub93_seq = Object.keys(stub93_seq);}
    for (stub94_itr = 0; stub94_itr < stub93_seq.length; stub94_itr += 1) {
        point = stub93_seq[stub94_itr];
        x = axes[0] + ((point["x"] - axes[2]) * axes[1]);
        _pymeth_append.call(taken, ([x - 4, axes[3] - ((point["y"] - axes[5]) * axes[4]), x + 4]));
    }
    stub95_seq = given;
    if ((typeof stub95_seq === "object") && (!Array.isArray(stub95_seq))) { stub95_seq = Object.keys(stub95_seq);}
    for (stub96_itr = 0; stub96_itr < stub95_seq.length; stub96_itr += 1) {
        point = stub95_seq[stub96_itr];
        if ((point["method"]==chosen)) {
            front = one_point(point, " chosen", axes, right, taken);
        }
    }
    stub97_seq = given;
    if ((typeof stub97_seq === "object") && (!Array.isArray(stub97_seq))) { stub97_seq = Object.keys(stub97_seq);}
    for (stub98_itr = 0; stub98_itr < stub97_seq.length; stub98_itr += 1) {
        point = stub97_seq[stub98_itr];
        if ((point["method"]!=chosen)) {
            front = one_point(point, "", axes, right, taken) + front;
        }
    }
    return front;
};

one_point = function flx_one_point (point, state, axes, right, taken) {
    var box, covered, drawn, length, start, stub100_itr, stub99_seq, tone, x, y;
    x = axes[0] + ((point["x"] - axes[2]) * axes[1]);
    y = axes[3] - ((point["y"] - axes[5]) * axes[4]);
    tone = point["tone"] + state;
    drawn = (((((("<g class=\"point ") + tone) + ("\" data-method=\"")) + _pyfunc_str(point["method"])) + ("\" data-tip=\"")) + point["tip"]) + ("\">");
    drawn = ((((((drawn + ("<circle cx=\"")) + place(x)) + ("\" cy=\"")) + place(y)) + ("\" r=\"")) + (((state==""))? ("4.5") : ("6.5"))) + ("\"/>");
    length = 6.6 * (point["name"].length);
    start = ((((x + 9) + length) < right))? (x + 9) : ((x - 9) - length);
    covered = ((start < axes[0]))? (1) : (0);
    stub99_seq = taken;
    if ((typeof stub99_seq === "object") && (!Array.isArray(stub99_seq))) { stub99_seq = Object.keys(stub99_seq);}
    for (stub100_itr = 0; stub100_itr < stub99_seq.length; stub100_itr += 1) {
        box = stub99_seq[stub100_itr];
        if (((((_pyfunc_abs((box[1] - y))) < ((((box[2] - box[0]) < 9))? (8) : (13)))) && (start < box[2]) && ((box[0] < (start + length))))) {
            covered = covered + 1;
        }
    }
    if (((covered==0) || (state!=""))) {
        _pymeth_append.call(taken, [start, y, start + length]);
        drawn = drawn + text_at(start, y + 4, "start", "name", point["name"]);
    }
    return drawn + "</g>";
};

nice_step = function flx_nice_step (span, parts) {
    var step;
    step = 1.0;
    while ((step * parts) > span) {
        step = step / 10;
    }
    while (((step * 10) * parts) <= span) {
        step = step * 10;
    }
    if ((((step * 5) * parts) <= span)) {
        return step * 5;
    }
    return ((((step * 2) * parts) <= span))? (step * 2) : (step);
};

opening = function flx_opening (width, height, label) {
    var at, size;
    size = (place(width) + " ") + place(height);
    at = (((("width=\"") + place(width)) + ("\" height=\"")) + place(height)) + ("\"");
    return (((((("<svg viewBox=\"0 0 ") + size) + ("\" ")) + at) + (" role=\"img\" aria-label=\"")) + label) + ("\">");
};

text_at = function flx_text_at (x, y, anchor, style, text) {
    var at;
    at = (((((((("<text x=\"") + place(x)) + ("\" y=\"")) + place(y)) + ("\" text-anchor=\"")) + anchor) + ("\" class=\"")) + style) + ("\">");
    return (at + text) + "</text>";
};

line_at = function flx_line_at (x, y, to_x, to_y, style) {
    var ends;
    ends = (((((((("x1=\"") + place(x)) + ("\" y1=\"")) + place(y)) + ("\" x2=\"")) + place(to_x)) + ("\" y2=\"")) + place(to_y)) + ("\"");
    return ((("<line " + ends) + (" class=\"")) + style) + ("\"/>");
};

box_at = function flx_box_at (x, y, width, height, style) {
    var corner, size;
    corner = (((("x=\"") + place(x)) + ("\" y=\"")) + place(y)) + ("\"");
    size = (((("width=\"") + place(width)) + ("\" height=\"")) + place(height)) + ("\"");
    return ((((("<rect " + corner) + " ") + size) + (" class=\"")) + style) + ("\"/>");
};

lines = function flx_lines (given, chosen, label, width) {
    var axes, bottom, boundary, decade, digit, drawn, every, front, height, least, left, low, most, named, right, scale, series, steps, stub101_seq, stub102_itr, stub103_seq, stub104_itr, stub105_seq, stub106_itr, stub107_seq, stub108_itr, top, value, x, y;
    height = 300;
    left = 62;
    right = width - 12;
    top = 24;
    bottom = height - 34;
    least = Math.max(1, (given[0]["values"][0]));
    most = least;
    stub103_seq = given;
    if ((typeof stub103_seq === "object") && (!Array.isArray(stub103_seq))) { stub103_seq = Object.keys(stub103_seq);}
    for (stub104_itr = 0; stub104_itr < stub103_seq.length; stub104_itr += 1) {
        series = stub103_seq[stub104_itr];
        stub101_seq = series["values"];
        if ((typeof stub101_seq === "object") && (!Array.isArray(stub101_seq))) { stub101_seq = Object.keys(stub101_seq);}
        for (stub102_itr = 0; stub102_itr < stub101_seq.length; stub102_itr += 1) {
            value = stub101_seq[stub102_itr];
            least = Math.min(least, Math.max(1, value));
            most = Math.max(most, value);
        }
    }
    low = log2_of(least) - 0.3;
    scale = (bottom - top) / ((log2_of(most) + 0.3) - low);
    steps = ((given[0]["values"]).length) - 1;
    drawn = opening(width, height, label);
    decade = 1;
    while (decade <= (most * 1.2)) {
        stub105_seq = ((most < (20 * least)))? ([1, 2, 5]) : ([1, 3]);
        if ((typeof stub105_seq === "object") && (!Array.isArray(stub105_seq))) { stub105_seq = Object.keys(stub105_seq);}
        for (stub106_itr = 0; stub106_itr < stub105_seq.length; stub106_itr += 1) {
            digit = stub105_seq[stub106_itr];
            y = bottom - ((log2_of(digit * decade) - low) * scale);
            if (((y <= bottom) && (y >= top))) {
                drawn = drawn + line_at(left, y, right, y, "grid");
                drawn = drawn + (text_at(left - 7, y + 4, "end", "tick", amount(digit * decade, BYTES)));
            }
        }
        decade = decade * 10;
    }
    every = Math.max(1, (Math.floor((steps + 7)/8)));
    for (boundary = 0; boundary < steps + 1; boundary += 1) {
        if (((boundary % every)==0)) {
            x = left + ((boundary / steps) * (right - left));
            drawn = drawn + (text_at(x, bottom + 16, "middle", "tick", _pyfunc_str(boundary)));
        }
    }
    drawn = drawn + (text_at((left + right) / 2, height - 3, "middle", "tick", "depth, in sublayers of the control"));
    axes = [left, right, bottom, low, scale];
    front = "";
    named = false;
    stub107_seq = given;
    if ((typeof stub107_seq === "object") && (!Array.isArray(stub107_seq))) { stub107_seq = Object.keys(stub107_seq);}
    for (stub108_itr = 0; stub108_itr < stub107_seq.length; stub108_itr += 1) {
        series = stub107_seq[stub108_itr];
        if ((series["method"]==chosen)) {
            front = (front + one_line(series, " chosen", axes)) + name_at(series, axes);
        } else {
            drawn = drawn + one_line(series, "", axes);
            if (((!named) && ((top_of(series)==most)))) {
                front = name_at(series, axes) + front;
                named = true;
            }
        }
    }
    drawn = drawn + front;
    return drawn + "</svg>";
};

one_line = function flx_one_line (series, state, axes) {
    var drawn, index, path, tone, values, x;
    values = series["values"];
    path = "";
    for (index = 0; index < values.length; index += 1) {
        x = axes[0] + ((index / (values.length - 1)) * (axes[1] - axes[0]));
        path = (((path + (((index==0))? ("M") : ("L"))) + place(x)) + " ") + (place(height_of(values[index], axes)));
    }
    tone = series["tone"] + state;
    drawn = (((((("<g class=\"series ") + tone) + ("\" data-method=\"")) + _pyfunc_str(series["method"])) + ("\" data-tip=\"")) + series["name"]) + ("\">");
    return ((((drawn + ("<path d=\"")) + path) + ("\" class=\"reach\"/><path d=\"")) + path) + ("\" class=\"stroke\"/></g>");
};

name_at = function flx_name_at (series, axes) {
    var y;
    y = Math.max(14, ((height_of(top_of(series), axes)) - 8));
    return (((("<g class=\"series ") + series["tone"]) + ("\">")) + text_at(axes[1], y, "end", "name", series["name"])) + "</g>";
};

height_of = function flx_height_of (value, axes) {
    return axes[2] - (((log2_of(Math.max(1, value))) - axes[3]) * axes[4]);
};

top_of = function flx_top_of (series) {
    var most, stub109_seq, stub110_itr, value;
    most = 0;
    stub109_seq = series["values"];
    if ((typeof stub109_seq === "object") && (!Array.isArray(stub109_seq))) { stub109_seq = Object.keys(stub109_seq);}
    for (stub110_itr = 0; stub110_itr < stub109_seq.length; stub110_itr += 1) {
        value = stub109_seq[stub110_itr];
        most = Math.max(most, value);
    }
    return most;
};

steps = function flx_steps (result, stages, microbatches, label, width) {
    var action, below, bottom, drawn, height, kind, left, middle, path, rank, ranks, right, scale, sent, shade, shown, stub111_seq, stub112_itr, stub113_seq, stub114_itr, stub115_seq, stub116_itr, stub117_seq, stub118_itr, stub119_seq, stub120_itr, turn;
    ranks = result["idle_share"].length;
    left = 52;
    right = width - 14;
    height = (RANK * ranks) + 26;
    scale = (right - left) / result["step_seconds"];
    drawn = opening(width, height, label);
    for (rank = 0; rank < ranks; rank += 1) {
        drawn = drawn + (text_at(left - 8, (RANK * rank) + 15, "end", "tick", "rank " + _pyfunc_str(rank)));
        drawn = drawn + (box_at(left, (RANK * rank) + 2, right - left, RANK - 5, "idle"));
    }
    for (turn = 0; turn < stages; turn += 1) {
        stub113_seq = ["forward", "backward"];
        if ((typeof stub113_seq === "object") && (!Array.isArray(stub113_seq))) { stub113_seq = Object.keys(stub113_seq);}
        for (stub114_itr = 0; stub114_itr < stub113_seq.length; stub114_itr += 1) {
            kind = stub113_seq[stub114_itr];
            path = "";
            stub111_seq = result["actions"];
            if ((typeof stub111_seq === "object") && (!Array.isArray(stub111_seq))) { stub111_seq = Object.keys(stub111_seq);}
            for (stub112_itr = 0; stub112_itr < stub111_seq.length; stub112_itr += 1) {
                action = stub111_seq[stub112_itr];
                if (((action["kind"]==kind) && ((Math.floor(action["stage"]/ranks)==turn)))) {
                    path = path + (outline(action, left, (RANK * action["rank"]) + 2, scale, RANK - 10, 0.4));
                }
            }
            shade = (((((2 * turn) >= stages)) && (stages > 1)))? (" paler") : ("");
            drawn = (((((drawn + ("<path d=\"")) + path) + ("\" class=\"")) + kind) + shade) + ("\"/>");
        }
    }
    stub117_seq = ["forward", "backward"];
    if ((typeof stub117_seq === "object") && (!Array.isArray(stub117_seq))) { stub117_seq = Object.keys(stub117_seq);}
    for (stub118_itr = 0; stub118_itr < stub117_seq.length; stub118_itr += 1) {
        kind = stub117_seq[stub118_itr];
        path = "";
        stub115_seq = result["transfers"];
        if ((typeof stub115_seq === "object") && (!Array.isArray(stub115_seq))) { stub115_seq = Object.keys(stub115_seq);}
        for (stub116_itr = 0; stub116_itr < stub115_seq.length; stub116_itr += 1) {
            sent = stub115_seq[stub116_itr];
            if ((sent["kind"]==kind)) {
                below = (((RANK * sent["source"]) + RANK) - 8) + (((kind=="forward"))? (0) : (2.5));
                path = path + outline(sent, left, below, scale, 2.5, 0);
            }
        }
        drawn = ((((drawn + ("<path d=\"")) + path) + ("\" class=\"sent ")) + kind) + ("\"/>");
    }
    drawn = drawn + numbers(result, left, scale);
    bottom = (RANK * ranks) + 2;
    drawn = drawn + line_at(left, bottom, right, bottom, "axis");
    drawn = drawn + text_at(left, bottom + 16, "start", "tick", "0");
    shown = 0;
    stub119_seq = result["actions"];
    if ((typeof stub119_seq === "object") && (!Array.isArray(stub119_seq))) { stub119_seq = Object.keys(stub119_seq);}
    for (stub120_itr = 0; stub120_itr < stub119_seq.length; stub120_itr += 1) {
        action = stub119_seq[stub120_itr];
        shown = Math.max(shown, (action["microbatch"] + 1));
    }
    middle = amount(result["step_seconds"] / 2, SECONDS);
    if ((shown < microbatches)) {
        middle = ((_pyfunc_str(shown) + " of the ") + _pyfunc_str(microbatches)) + " microbatches";
    }
    drawn = drawn + (text_at((left + right) / 2, bottom + 16, "middle", "tick", middle));
    return (drawn + (text_at(right, bottom + 16, "end", "tick", amount(result["step_seconds"], SECONDS)))) + "</svg>";
};

outline = function flx_outline (action, left, top, scale, height, gap) {
    var across, length;
    length = (action["end"] - action["start"]) * scale;
    length = ((length > (3 * gap)))? (length - gap) : (length);
    across = ((((("h" + place(length)) + "v") + place(height)) + "h") + place(0 - length)) + "z";
    return ((("M" + (place(left + (action["start"] * scale)))) + " ") + place(top)) + across;
};

numbers = function flx_numbers (result, left, scale) {
    var action, drawn, middle, stub121_seq, stub122_itr, word;
    drawn = "";
    stub121_seq = result["actions"];
    if ((typeof stub121_seq === "object") && (!Array.isArray(stub121_seq))) { stub121_seq = Object.keys(stub121_seq);}
    for (stub122_itr = 0; stub122_itr < stub121_seq.length; stub122_itr += 1) {
        action = stub121_seq[stub122_itr];
        word = _pyfunc_str(action["microbatch"]);
        if ((((action["end"] - action["start"]) * scale) >= ((7 * word.length) + 3))) {
            middle = left + (((action["start"] + action["end"]) / 2) * scale);
            drawn = drawn + (text_at(middle, (RANK * action["rank"]) + 15, "middle", "number", word));
        }
    }
    return drawn;
};

work_of = function flx_work_of (run) {
    return ({batch: run["batch"], tokens: run["tokens"], context: 0, tensor: run["tensor"], sequence: run["sequence"], engine: run["engine"]});
};

stage_seconds = function flx_stage_seconds (model, run, rates, link) {
    var backward, depth, edges, forward, found, head, index, part, shared, stage, stages, work;
    work = work_of(run);
    stages = run["pipeline"] * run["virtual"];
    edges = edges_of(model, run);
    found = ({forward: [], backward: [], depth: [], link: []});
    for (stage = 0; stage < stages; stage += 1) {
        forward = 0;
        backward = 0;
        depth = 0;
        shared = 0;
        for (index = edges[stage]; index < edges[stage + 1]; index += 1) {
            part = sublayer_seconds(model, model["sublayers"][index], work, rates, link);
            forward = ((forward + part["forward"]) + part["depth"]) + part["link"];
            backward = ((backward + part["backward"]) + part["depth_back"]) + part["link_back"];
            depth = (depth + part["depth"]) + part["depth_back"];
            shared = (shared + part["link"]) + part["link_back"];
            if ((run["recompute"]=="block")) {
                backward = ((backward + part["forward"]) + part["depth"]) + part["link"];
                depth = depth + part["depth"];
            }
        }
        if ((stage==(stages - 1))) {
            head = head_seconds(model, work, rates);
            forward = (forward + head["forward"]) + head["depth"];
            backward = (backward + head["backward"]) + head["depth_back"];
            depth = (depth + head["depth"]) + head["depth_back"];
        }
        _pymeth_append.call(found["forward"], forward);
        _pymeth_append.call(found["backward"], backward);
        _pymeth_append.call(found["depth"], depth);
        _pymeth_append.call(found["link"], shared);
    }
    return found;
};

edges_of = function flx_edges_of (model, run) {
    return (function list_comprehension (iter0) {var res = [];var block, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {block = iter0[i0];{res.push(boundary_of_block(model, block));}}return res;}).call(this, even_cuts(model["n_layers"], _pyfunc_op_mult(run["pipeline"], run["virtual"])));
};

sent_bytes = function flx_sent_bytes (model, run) {
    var tokens;
    tokens = tokens_on_rank(work_of(run));
    return (function list_comprehension (iter0) {var res = [];var hop, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {hop = iter0[i0];{res.push(_pyfunc_op_mult(tokens, hop));}}return res;}).call(this, hop_bytes(model["leaves"], edges_of(model, run), run["pipeline"], run["forwarding"]));
};

gradients_waiting = function flx_gradients_waiting (model, run) {
    var found, tokens;
    tokens = tokens_on_rank(work_of(run));
    found = waiting_bytes(model["leaves"], edges_of(model, run), run["pipeline"], run["forwarding"]);
    return (function list_comprehension (iter0) {var res = [];var part, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {part = iter0[i0];{res.push((function list_comprehension (iter0) {var res = [];var each, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {each = iter0[i0];{res.push(_pyfunc_op_mult(tokens, each));}}return res;}).call(this, part));}}return res;}).call(this, found);
};

stage_memory = function flx_stage_memory (model, run) {
    var depth, depth_params, each, edges, first, fixed, gradients, here, index, kept, last, matrices, matrix, own, params, replicas, saved, shards, stage, stages, sub, tokens, weights;
    stages = run["pipeline"] * run["virtual"];
    edges = edges_of(model, run);
    tokens = tokens_on_rank(work_of(run));
    matrix = model["vocab_size"] * model["d_model"];
    replicas = run["data"];
    weights = model["weights_bytes"] / (((run["sharding"]=="weights"))? (replicas) : (1));
    gradients = model["gradients_bytes"] / (((run["sharding"]=="weights"))? (replicas) : (1));
    shards = ((run["sharding"]=="none"))? (1) : (replicas);
    each = (weights + gradients) + (model["optimizer_bytes"] / shards);
    fixed = [];
    matrices = [];
    saved = [];
    params = [];
    depth_params = [];
    for (stage = 0; stage < stages; stage += 1) {
        first = edges[stage];
        last = edges[stage + 1];
        here = 0;
        depth = 0;
        own = 0;
        for (index = first; index < last; index += 1) {
            sub = model["sublayers"][index];
            own = (own + (sub["matrices"] / run["tensor"])) + (sub["depth"]["matrices"]);
            here = (here + (sub["params"] / run["tensor"])) + (sub["norms"] * model["norm_params"]);
            depth = depth + (sub["depth"]["params"]);
        }
        if ((stage==0)) {
            here = here + (matrix / run["tensor"]);
        }
        if ((stage < run["pipeline"])) {
            depth = depth + (model["ends"]["lent"]);
        }
        if ((stage==(stages - 1))) {
            own = own + (model["ends"]["matrices"]);
            here = here + model["norm_params"];
            depth = (depth + (model["ends"]["params"])) - (model["ends"]["lent"]);
            if (((model["tied"]==0) || (stage > 0))) {
                here = here + (matrix / run["tensor"]);
            }
        }
        kept = 0;
        if ((run["recompute"]=="block")) {
            kept = recomputed_bytes_of(model, first, last, tokens);
        } else {
            kept = saved_bytes_of(model, first, last, tokens);
        }
        if ((stage==(stages - 1))) {
            kept = kept + ends_saved_bytes(model, tokens, run["tensor"]);
        }
        _pymeth_append.call(params, (here + depth));
        _pymeth_append.call(depth_params, depth);
        _pymeth_append.call(matrices, own);
        _pymeth_append.call(fixed, (((here + depth) * each) - ((own * model["moment_bytes"]) / shards)));
        _pymeth_append.call(saved, kept);
    }
    return ({fixed: fixed, saved: saved, params: params, depth_params: depth_params, matrices: matrices});
};

by_rank = function flx_by_rank (values, ranks) {
    var found, stage, stub123_, stub123__, stub123_i0, stub123_iter0;
    stub123_ = [];stub123_iter0 = _pyfunc_range(0, ranks, 1);if ((typeof stub123_iter0 === "object") && (!Array.isArray(stub123_iter0))) {stub123_iter0 = Object.keys(stub123_iter0);}for (stub123_i0=0; stub123_i0<stub123_iter0.length; stub123_i0++) {stub123__ = stub123_iter0[stub123_i0];{stub123_.push(0.0);}}
    found = stub123_;
    for (stage = 0; stage < values.length; stage += 1) {
        found[stage % ranks] = found[stage % ranks] + values[stage];
    }
    return found;
};

training_step = function flx_training_step (model, run, rates, links) {
    var depth, fixed, flow, largest, last_index, link, memory, peaks, ranks, seconds, sent, step, stub124_, stub124_i0, stub124_iter0, stub124_peak, stub125_seq, stub126_itr, tokens, updates, value;
    ranks = run["pipeline"];
    seconds = stage_seconds(model, run, rates, links["tensor"]);
    sent = sent_bytes(model, run);
    link = link_seconds(sent, links["pipeline"]);
    memory = stage_memory(model, run);
    fixed = by_rank(memory["fixed"], ranks);
    flow = pipeline_flow(model, run, seconds, sent, link, memory["saved"], fixed);
    peaks = flow["peaks"];
    updates = update_seconds(model, run, memory, seconds, rates, links);
    if ((run["recompute"]=="block")) {
        last_index = model["sublayers"].length;
        largest = largest_block_bytes(model, 0, last_index, tokens_on_rank(work_of(run)));
        stub124_ = [];stub124_iter0 = peaks;if ((typeof stub124_iter0 === "object") && (!Array.isArray(stub124_iter0))) {stub124_iter0 = Object.keys(stub124_iter0);}for (stub124_i0=0; stub124_i0<stub124_iter0.length; stub124_i0++) {stub124_peak = stub124_iter0[stub124_i0];{stub124_.push(stub124_peak + largest);}}
        peaks = stub124_;
    }
    step = (flow["step_seconds"] + updates["gradients"]) + updates["optimizer"];
    tokens = ((run["batch"] * run["tokens"]) * run["microbatches"]) * run["data"];
    depth = 0;
    stub125_seq = seconds["depth"];
    if ((typeof stub125_seq === "object") && (!Array.isArray(stub125_seq))) { stub125_seq = Object.keys(stub125_seq);}
    for (stub126_itr = 0; stub126_itr < stub125_seq.length; stub126_itr += 1) {
        value = stub125_seq[stub126_itr];
        depth = depth + value;
    }
    return ({step_seconds: step, tokens_per_second: tokens / step, pipeline_seconds: flow["step_seconds"], exposed_seconds: flow["exposed_seconds"], bubble: flow["bubble"], gradient_seconds: updates["gradients"], optimizer_seconds: updates["optimizer"], depth_seconds: (depth * run["microbatches"]) / ranks, sent_bytes: sent, data_bytes: updates["data_bytes"], memory_bytes: peaks, flops: ((3 * (forward_counts(model, run["batch"], run["tokens"])["all"])) * run["microbatches"]) * run["data"], simulation: flow["simulation"]});
};

link_seconds = function flx_link_seconds (sent, link) {
    return (function list_comprehension (iter0) {var res = [];var b, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {b = iter0[i0];{res.push(transfer_seconds(b, link["pair_bytes_per_second"], link["latency_seconds"]));}}return res;}).call(this, sent);
};

simulated_microbatches = function flx_simulated_microbatches (ranks, microbatches) {
    var more;
    if ((microbatches <= (6 * ranks))) {
        return [microbatches, microbatches];
    }
    more = (5 * ranks) + (microbatches % ranks);
    return [more - (2 * ranks), more];
};

extended = function flx_extended (fewer, more, counts, microbatches) {
    if ((counts[0]==counts[1])) {
        return more;
    }
    return more + (((microbatches - counts[1]) * (more - fewer)) / (counts[1] - counts[0]));
};

pipeline_flow = function flx_pipeline_flow (model, run, seconds, sent, link, saved, fixed) {
    var busy, count, counts, found, free, ideal, ideal_step, order, peaks, ranks, real, stage, step, stub127_, stub127__, stub127_i0, stub127_iter0, stub128_seq, stub129_itr, waiting;
    ranks = run["pipeline"];
    counts = simulated_microbatches(ranks, run["microbatches"]);
    stub127_ = [];stub127_iter0 = link;if ((typeof stub127_iter0 === "object") && (!Array.isArray(stub127_iter0))) {stub127_iter0 = Object.keys(stub127_iter0);}for (stub127_i0=0; stub127_i0<stub127_iter0.length; stub127_i0++) {stub127__ = stub127_iter0[stub127_i0];{stub127_.push(0.0);}}
    free = stub127_;
    waiting = gradients_waiting(model, run);
    found = [];
    stub128_seq = counts;
    if ((typeof stub128_seq === "object") && (!Array.isArray(stub128_seq))) { stub128_seq = Object.keys(stub128_seq);}
    for (stub129_itr = 0; stub129_itr < stub128_seq.length; stub129_itr += 1) {
        count = stub128_seq[stub129_itr];
        order = schedule_order(run["schedule"], ranks, run["virtual"], count);
        real = simulate(order, seconds["forward"], seconds["backward"], link, link, run["transfers"]);
        ideal = simulate(order, seconds["forward"], seconds["backward"], free, free, run["transfers"]);
        peaks = peak_memory(real, fixed, saved, sent, sent, waiting);
        _pymeth_append.call(found, ({simulation: real, step: real["step_seconds"], ideal: ideal["step_seconds"], peaks: peaks}));
        if ((counts[0]==counts[1])) {
            _pymeth_append.call(found, found[0]);
            break;
        }
    }
    step = extended(found[0]["step"], found[1]["step"], counts, run["microbatches"]);
    ideal_step = extended(found[0]["ideal"], found[1]["ideal"], counts, run["microbatches"]);
    busy = 0;
    for (stage = 0; stage < saved.length; stage += 1) {
        busy = busy + (run["microbatches"] * ((seconds["forward"][stage]) + (seconds["backward"][stage])));
    }
    return ({step_seconds: step, exposed_seconds: step - ideal_step, bubble: 1 - ((busy / ranks) / step), peaks: (function list_comprehension (iter0) {var res = [];var rank, i0;if ((typeof iter0 === "object") && (!Array.isArray(iter0))) {iter0 = Object.keys(iter0);}for (i0=0; i0<iter0.length; i0++) {rank = iter0[i0];{res.push(extended(found[0]["peaks"][rank], found[1]["peaks"][rank], counts, run["microbatches"]));}}return res;}).call(this, _pyfunc_range(0, ranks, 1)), simulation: found[1]["simulation"]});
};

estimated_step = function flx_estimated_step (model, run, rates, links) {
    var both, each, fixed, flying, held, largest, memory, messages, pipeline, rank, ranks, seconds, sent, slowest, stub130_, stub130_i0, stub130_iter0, stub130_stage, stub131_seq, stub132_itr, stub133_seq, stub134_itr, stub135_, stub135_i0, stub135_iter0, stub135_stage, updates, value, virtual, whole;
    ranks = run["pipeline"];
    virtual = run["virtual"];
    seconds = stage_seconds(model, run, rates, links["tensor"]);
    sent = sent_bytes(model, run);
    memory = stage_memory(model, run);
    stub130_ = [];stub130_iter0 = _pyfunc_range(0, (ranks * virtual), 1);if ((typeof stub130_iter0 === "object") && (!Array.isArray(stub130_iter0))) {stub130_iter0 = Object.keys(stub130_iter0);}for (stub130_i0=0; stub130_i0<stub130_iter0.length; stub130_i0++) {stub130_stage = stub130_iter0[stub130_i0];{stub130_.push((seconds["forward"][stub130_stage]) + (seconds["backward"][stub130_stage]));}}
    both = stub130_;
    slowest = 0;
    whole = 0;
    stub131_seq = by_rank(both, ranks);
    if ((typeof stub131_seq === "object") && (!Array.isArray(stub131_seq))) { stub131_seq = Object.keys(stub131_seq);}
    for (stub132_itr = 0; stub132_itr < stub131_seq.length; stub132_itr += 1) {
        value = stub131_seq[stub132_itr];
        slowest = Math.max(slowest, value);
        whole = whole + value;
    }
    messages = 0;
    stub133_seq = link_seconds(sent, links["pipeline"]);
    if ((typeof stub133_seq === "object") && (!Array.isArray(stub133_seq))) { stub133_seq = Object.keys(stub133_seq);}
    for (stub134_itr = 0; stub134_itr < stub133_seq.length; stub134_itr += 1) {
        value = stub133_seq[stub134_itr];
        messages = messages + (2 * value);
    }
    pipeline = (run["microbatches"] * slowest) + (((whole - slowest) + messages) / virtual);
    if ((run["transfers"]=="blocking")) {
        pipeline = pipeline + ((run["microbatches"] * messages) / ranks);
    }
    updates = update_seconds(model, run, memory, seconds, rates, links);
    stub135_ = [];stub135_iter0 = _pyfunc_range(0, (ranks * virtual), 1);if ((typeof stub135_iter0 === "object") && (!Array.isArray(stub135_iter0))) {stub135_iter0 = Object.keys(stub135_iter0);}for (stub135_i0=0; stub135_i0<stub135_iter0.length; stub135_i0++) {stub135_stage = stub135_iter0[stub135_i0];{stub135_.push((memory["saved"][stub135_stage]) + (((stub135_stage > 0))? (sent[stub135_stage - 1]) : (0)));}}
    held = stub135_;
    fixed = by_rank(memory["fixed"], ranks);
    each = by_rank(held, ranks);
    largest = 0;
    for (rank = 0; rank < ranks; rank += 1) {
        flying = run["microbatches"];
        if ((run["schedule"]=="1f1b")) {
            flying = Math.min(flying, (ranks - rank));
        }
        if ((run["schedule"]=="interleaved")) {
            flying = Math.min(flying, (((((virtual - 1) * ranks) + (2 * ((ranks - 1) - rank))) + 1) / virtual));
        }
        largest = Math.max(largest, (fixed[rank] + (flying * each[rank])));
    }
    if ((run["recompute"]=="block")) {
        largest = largest + (largest_block_bytes(model, 0, model["sublayers"].length, tokens_on_rank(work_of(run))));
    }
    return ({step_seconds: (pipeline + updates["gradients"]) + updates["optimizer"], memory_bytes: largest});
};

update_seconds = function flx_update_seconds (model, run, memory, seconds, rates, links) {
    var backward, data_bytes, exposed, forward, gradients, here, lent, matrices, mixing, moved, optimizer, params, rank, sent, shards, shared;
    forward = min_of(by_rank(seconds["forward"], run["pipeline"]));
    backward = min_of(by_rank(seconds["backward"], run["pipeline"]));
    params = by_rank(memory["params"], run["pipeline"]);
    mixing = by_rank(memory["depth_params"], run["pipeline"]);
    matrices = by_rank(memory["matrices"], run["pipeline"]);
    gradients = 0;
    optimizer = 0;
    data_bytes = 0;
    lent = all_reduce_bytes(run["pipeline"], (model["ends"]["lent"]) * model["gradients_bytes"]);
    for (rank = 0; rank < run["pipeline"]; rank += 1) {
        here = params[rank];
        shared = mixing_gradient_bytes(run["tensor"], mixing[rank], model["gradients_bytes"], run["sequence"]);
        sent = data_parallel_bytes(run["data"], here, model["gradients_bytes"], model["weights_bytes"], run["microbatches"], run["sharding"]);
        data_bytes = Math.max(data_bytes, sent);
        exposed = exposed_data_seconds(model, run, here, forward, backward, links["data"]);
        gradients = Math.max(gradients, (exposed + collective_seconds(shared, links["tensor"])));
        shards = ((run["sharding"]=="none"))? (1) : (run["data"]);
        moved = (here / shards) * (((2 * model["optimizer_bytes"]) + model["gradients_bytes"]) + model["weights_bytes"]);
        moved = moved - (((2 * matrices[rank]) / shards) * model["moment_bytes"]);
        optimizer = Math.max(optimizer, memory_seconds(moved, rates));
    }
    gradients = gradients + collective_seconds(lent, links["pipeline"]);
    return ({gradients: gradients, optimizer: optimizer, data_bytes: data_bytes});
};

exposed_data_seconds = function flx_exposed_data_seconds (model, run, params, forward, backward, link) {
    var first, gathered, ranks, reduced, second, sent;
    ranks = run["data"];
    if ((run["sharding"]!="weights")) {
        sent = data_parallel_bytes(ranks, params, model["gradients_bytes"], model["weights_bytes"], run["microbatches"], run["sharding"]);
        return Math.max(0, (collective_seconds(sent, link) - backward));
    }
    gathered = all_gather_bytes(ranks, params * model["weights_bytes"]);
    reduced = reduce_scatter_bytes(ranks, params * model["gradients_bytes"]);
    first = Math.max(0, (collective_seconds(gathered, link) - forward));
    second = Math.max(0, (collective_seconds(gathered + reduced, link) - backward));
    return run["microbatches"] * (first + second);
};

min_of = function flx_min_of (values) {
    var least, stub136_seq, stub137_itr, value;
    least = values[0];
    stub136_seq = values;
    if ((typeof stub136_seq === "object") && (!Array.isArray(stub136_seq))) { stub136_seq = Object.keys(stub136_seq);}
    for (stub137_itr = 0; stub137_itr < stub136_seq.length; stub137_itr += 1) {
        value = stub136_seq[stub137_itr];
        least = Math.min(least, value);
    }
    return least;
};

forward_pass = function flx_forward_pass (model, work, rates, link) {
    var depth, head, last, part, shared, stub138_seq, stub139_itr, sub, total;
    total = 0;
    depth = 0;
    shared = 0;
    stub138_seq = model["sublayers"];
    if ((typeof stub138_seq === "object") && (!Array.isArray(stub138_seq))) { stub138_seq = Object.keys(stub138_seq);}
    for (stub139_itr = 0; stub139_itr < stub138_seq.length; stub139_itr += 1) {
        sub = stub138_seq[stub139_itr];
        part = sublayer_seconds(model, sub, work, rates, link);
        total = total + part["forward"];
        depth = depth + part["depth"];
        shared = shared + part["link"];
    }
    last = ({batch: work["batch"], tokens: 1, context: work["context"], tensor: work["tensor"], sequence: "none", engine: work["engine"]});
    head = head_seconds(model, last, rates);
    return ({seconds: (((total + depth) + shared) + head["forward"]) + head["depth"], depth_seconds: depth + head["depth"], link_seconds: shared});
};

prefill_state_bytes = function flx_prefill_state_bytes (model, work, chunk_tokens) {
    var boundary, largest;
    largest = 0;
    for (boundary = 0; boundary < (model["sublayers"].length) + 1; boundary += 1) {
        largest = Math.max(largest, state_bytes(model, boundary));
    }
    return work["batch"] * stored_bytes(largest, work["tokens"], chunk_tokens, work["tensor"], work["sequence"]);
};

SECONDS = [[1, "s"], [0.001, "ms"], [1e-06, "\u00b5s"]];
BYTES = [[1000000000000, "TB"], [1000000000, "GB"], [1000000, "MB"], [1000, "kB"], [1, "B"]];
COUNTS = [[1000000000000, "T"], [1000000000, "B"], [1000000, "M"], [1000, "k"], [1, ""]];
MINUS = "\u2212";
fixed = function flx_fixed (value, places) {
    var _, rest, scale, scaled, sign;
    scale = 1;
    for (_ = 0; _ < places; _ += 1) {
        scale = scale * 10;
    }
    scaled = _pyfunc_int(((_pyfunc_abs(value) * scale) + 0.5));
    sign = (((value < 0) && (scaled > 0)))? ("-") : ("");
    if ((places==0)) {
        return sign + _pyfunc_str(scaled);
    }
    rest = _pyfunc_str((scaled % scale));
    while (rest.length < places) {
        rest = "0" + rest;
    }
    return ((sign + (_pyfunc_str(Math.floor(scaled/scale)))) + ".") + rest;
};

three_digits = function flx_three_digits (value) {
    var size;
    size = _pyfunc_abs(value);
    if ((size >= 100)) {
        return fixed(value, 0);
    }
    return ((size >= 10))? (fixed(value, 1)) : (fixed(value, 2));
};

amount = function flx_amount (value, units) {
    var last, stub140_seq, stub141_itr, unit;
    if ((value < 0)) {
        return MINUS + amount(0 - value, units);
    }
    if ((value==0)) {
        return "0";
    }
    stub140_seq = units;
    if ((typeof stub140_seq === "object") && (!Array.isArray(stub140_seq))) { stub140_seq = Object.keys(stub140_seq);}
    for (stub141_itr = 0; stub141_itr < stub140_seq.length; stub141_itr += 1) {
        unit = stub140_seq[stub141_itr];
        if ((value >= (0.9995 * unit[0]))) {
            return ((unit[1]!=""))? ((three_digits(value / unit[0]) + " ") + unit[1]) : (fixed(value, 0));
        }
    }
    last = units[units.length - 1];
    return ((last[1]!=""))? ((three_digits(value / last[0]) + " ") + last[1]) : (fixed(value, 0));
};

percent = function flx_percent (share) {
    var size;
    size = fixed(100 * _pyfunc_abs(share), ((_pyfunc_abs(share) < 0.9995))? (1) : (0));
    return (((((share < 0) && (size!="0.0")))? (MINUS) : ("")) + size) + " %";
};

place = function flx_place (value) {
    return fixed(value, 1);
};

log2_of = function flx_log2_of (value) {
    var _, part, result;
    result = 0.0;
    while (value >= 2) {
        value = value / 2;
        result = result + 1;
    }
    while (value < 1) {
        value = value * 2;
        result = result - 1;
    }
    part = 0.5;
    for (_ = 0; _ < 20; _ += 1) {
        value = value * value;
        if ((value >= 2)) {
            value = value / 2;
            result = result + part;
        }
        part = part / 2;
    }
    return result;
};

return { all_gather_bytes, reduce_scatter_bytes, all_reduce_bytes, tensor_parallel_bytes, tensor_parallel_forward_bytes, data_parallel_bytes, mixing_gradient_bytes, stored_tokens, stored_bytes, even_cuts, hop_bytes, waiting_bytes, alive, held, visible_pairs_of, pair_flops, pair_flops_of_one, forward_counts, parameter_counts, state_bytes, new_state_bytes, boundary_of_block, kept_leaf_bytes, saved_bytes_of, recomputed_bytes_of, largest_block_bytes, ends_saved_bytes, cache_bytes_of, tone_of, limit_of, limit_text, ranked, with_control, advice, cost_in_words, bars_of, points_of, figure, facts, overhead, best_rows, table_row, table_rows, harmonic_size, matmul_efficiency, operator, compute_seconds, memory_seconds, launch_seconds, operator_seconds, total_seconds, fused, bound, bound_by, tokens_on_rank, pairs_of_work, weights_read, cache_read, mixer_operators, depth_operator, collective_seconds, sublayer_seconds, head_seconds, gpus_of, run_of, sequence_of, work_of_prompts, reach_of, link_of, links_of, refusal, unpacked, copied, place_of, model_of, step_of, states_of, method_row, methods_of, sorted_by, gpipe_order, one_f_one_b_order, interleaved_order, schedule_order, joined, ideal_bubble, transfer_seconds, simulate, exposed_seconds, peak_memory, bars, points, all_points, one_point, nice_step, opening, text_at, line_at, box_at, lines, one_line, name_at, height_of, top_of, steps, outline, numbers, work_of, stage_seconds, edges_of, sent_bytes, gradients_waiting, stage_memory, by_rank, training_step, link_seconds, simulated_microbatches, extended, pipeline_flow, estimated_step, update_seconds, exposed_data_seconds, min_of, forward_pass, prefill_state_bytes, fixed, three_digits, amount, percent, place, log2_of };
})();
